"""The operator's page: what lives, as HTML that updates itself."""
