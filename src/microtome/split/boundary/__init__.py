"""The boundary: the values that cross a cut, and their wire format."""
