"""Random JSON schemas: few are refused, and what the masks allow conforms to the schema."""

import json
import random
from collections import Counter
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis_jsonschema._canonicalise import SCHEMA_KEYS
from hypothesis_jsonschema import from_schema

from longshore.protocol.requests import StructuredOutput
