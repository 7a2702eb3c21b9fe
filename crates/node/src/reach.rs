//! Ways in which a client's packets reach the owner of its flow. Everything in which they differ is asked of the trait
//! [`Reach`]; nothing outside of this module compares them.

use std::fmt::Debug;

use holdfast_bpf::shared_with_c::{REACH_BROADCAST, REACH_STEER};

use crate::config::PacketRouting;

/// A way in which packets reach the owner.
pub trait Reach: Debug + Send + Sync {
    /// Returns the name in configurations and answers.
    fn name(&self) -> &'static str;

    /// Returns the number by which the packet programs know the way.
    fn program_number(&self) -> u8;

    /// Returns the link address that the service addresses resolve to at all nodes; zeros if each has its own.
    fn shared_link_address(&self) -> [u8; 6] {
        [0; 6]
    }

    /// Returns true if one node, the contact node, receives all packets: the service addresses are on its interface, and it
    /// decides at run time where new flows go.
    fn has_contact_node(&self) -> bool;

    /// Returns true if every node receives every packet. An acceptor then gets a moving flow's packets without the donor.
    fn every_node_receives(&self) -> bool {
        !self.has_contact_node()
    }
}

/// Returns the way that a configuration names.
pub fn reach_of(routing: PacketRouting) -> Box<dyn Reach> {
    match routing {
        PacketRouting::Steer => Box::new(Steer),
        PacketRouting::Broadcast { shared_mac } => Box::new(Broadcast { shared_mac }),
    }
}

/// The contact node has the service addresses, and forwards each flow to its owner.
#[derive(Debug)]
struct Steer;

impl Reach for Steer {
    fn name(&self) -> &'static str {
        "steer"
    }

    fn program_number(&self) -> u8 {
        REACH_STEER
    }

    fn has_contact_node(&self) -> bool {
        true
    }
}

/// Every node receives all packets, at a shared link address, and accepts the packets of its own flows.
#[derive(Debug)]
struct Broadcast {
    shared_mac: [u8; 6],
}

impl Reach for Broadcast {
    fn name(&self) -> &'static str {
        "broadcast"
    }

    fn program_number(&self) -> u8 {
        REACH_BROADCAST
    }

    fn shared_link_address(&self) -> [u8; 6] {
        self.shared_mac
    }

    fn has_contact_node(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_differ_as_configured() {
        let (steer, broadcast) = (
            reach_of(PacketRouting::Steer),
            reach_of(PacketRouting::Broadcast { shared_mac: [2; 6] }),
        );
        assert_eq!((steer.name(), broadcast.name()), ("steer", "broadcast"));
        assert_ne!(steer.program_number(), broadcast.program_number());
        assert!(steer.has_contact_node() && !steer.every_node_receives());
        assert!(!broadcast.has_contact_node() && broadcast.every_node_receives());
        assert_eq!(steer.shared_link_address(), [0; 6]);
        assert_eq!(broadcast.shared_link_address(), [2; 6]);
    }
}
