//! See the package description.
#![forbid(unsafe_code)]
