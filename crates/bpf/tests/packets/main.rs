//! The data plane on real packets: namespaces, bridges and sockets made by the tests themselves. Needs root, `ip` and
//! `ethtool`.

mod steer;
mod support;
