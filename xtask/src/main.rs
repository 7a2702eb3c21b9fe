//! Workspace chores.
#![forbid(unsafe_code)]

fn main() {}
