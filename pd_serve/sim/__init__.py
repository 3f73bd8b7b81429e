"""The production policies on virtual time: clusters that no one owns, judged before they are built."""
