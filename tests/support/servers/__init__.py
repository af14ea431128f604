"""HTTP servers for the tests of OpenAI clients: a scripted one, and transformers' own."""
