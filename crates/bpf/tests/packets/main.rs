//! Tests of the data plane with real packets: namespaces, bridges and sockets made by the tests themselves. Need root,
//! `ip` and `ethtool`.

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
