"""The laws of DESIGN.md as properties of whole replays, and the bars of the source tree."""
