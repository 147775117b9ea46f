"""From logits to tokens: what requests change in their logits, the choice, and what comes of it."""
