"""The settings that a user gives, stated once and read from flags, variables, files, keywords."""
