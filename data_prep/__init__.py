"""Makes the data that the recipes train on: a real-data path, and an offline one beside it."""
