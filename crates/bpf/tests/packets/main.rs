//! Tests of the data plane with real packets: namespaces, bridges and sockets made by the tests themselves. Need root,
//! `ip` and `ethtool`.

mod broadcast;
mod encap;
mod flow_group;
mod fragments;
mod lease;
mod ownership;
mod placement;
mod port_reuse;
mod restart;
mod steer;
mod support;
mod transit;
