//! Tests of the channel over real TLS on loopback, with correct peers and with all kinds of incorrect ones.

mod bad_input;
mod certificates;
mod disagreement;
mod group;
mod lifecycle;
mod seeds;
mod traffic;
