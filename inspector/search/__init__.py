"""The pages that search runs: tokens, findings and metadata."""
