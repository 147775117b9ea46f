"""Routes for vectors and scores: embeddings, ranking, classification."""
