"""A task of an agent program, which talks to the model through the OpenAI API."""
