//! Processes from outside and anew: what a running process consists of, out of one host and into another.

pub mod files;
