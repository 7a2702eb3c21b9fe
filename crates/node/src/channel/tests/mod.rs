//! The channel over real TLS on loopback: peers that behave, and strangers of every kind.

mod bad_input;
mod certificates;
mod group;
mod lifecycle;
mod traffic;
