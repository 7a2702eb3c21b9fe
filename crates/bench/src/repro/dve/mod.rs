//! Paper 002, "An Efficient Process Live Migration Mechanism for Load Balanced Distributed Virtual Environments": its
//! measurements of moves, made with the daemons in a lab.

pub(super) mod figure4;
mod figure5;
pub(super) mod figure5b;
pub(super) mod figure5c;
