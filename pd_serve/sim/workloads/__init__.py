"""What arrives when: generators with published distributions, and traces in files."""
