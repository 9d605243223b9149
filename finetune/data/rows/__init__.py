"""Token ids of rows: encoded, packed, stored, ordered, collated."""
