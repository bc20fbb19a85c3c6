"""Rules between keys of a recipe, which no single field can say. Every message names the key and the fix."""
