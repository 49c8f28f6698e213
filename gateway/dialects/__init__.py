"""How clients speak: each dialect parses bytes into a task and renders an outcome into bytes, and does no more."""
