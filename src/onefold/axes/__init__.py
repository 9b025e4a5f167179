"""Model axes beside data: pipelines, sequences and experts; clipping over all of them."""
