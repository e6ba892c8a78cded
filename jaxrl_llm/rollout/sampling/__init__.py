"""One token from logits: penalties, filters, the draw and what is recorded of it."""
