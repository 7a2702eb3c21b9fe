//! The data plane on real packets: namespaces, bridges and sockets made by the tests themselves. Needs root, `ip` and
//! `ethtool`.

mod again;
mod broadcast;
mod convoy;
mod encap;
mod fragments;
mod ownership;
mod placement;
mod restart;
mod steer;
mod support;
mod transit;
