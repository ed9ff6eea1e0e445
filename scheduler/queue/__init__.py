"""Who is next: requests that wait, and the policies that order them."""
