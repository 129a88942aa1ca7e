"""Judge: a language model that scores responses."""
