"""From prompts to scored answers: the first half of a step, in turn with the trainer or ahead of it."""
