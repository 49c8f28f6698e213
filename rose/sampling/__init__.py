"""From logits to tokens: parameters, penalties, truncation, draws, log probabilities, grammars. Knows no model."""
