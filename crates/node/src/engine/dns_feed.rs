//! Tells the DNS server which service addresses serve.

use std::time::Duration;

use holdfast_dns::{GroupService, TransportProtocol};
use holdfast_wire::Protocol;

use super::Engine;
use crate::reach::reach_of;

/// Time for which addresses stay in answers while this node has no contact node, in a group that runs itself: the next
/// contact node takes over within that time.
const TAKEOVER_TIME: Duration = Duration::from_secs(3);

impl Engine {
    /// Publishes the service addresses, if this node answers DNS queries and knows the services of its group.
    pub(super) fn publish_services(&mut self) {
        let Some(feed) = self.dns.clone() else {
            return;
        };
        let now = self.now();
        if self.reaches_contact() {
            self.contact_reached_at = Some(now);
        }
        if self.membership.is_some() && !self.group_services.are_known() {
            return;
        }
        let patience = match self.membership {
            Some(_) => TAKEOVER_TIME,
            None => Duration::ZERO,
        };
        let reached_at = self.contact_reached_at;
        let is_reached = reached_at.is_some_and(|at| now.saturating_sub(at) <= patience);
        let services = self.config.services.iter().filter_map(|service| {
            let is_served = self.health.is_served(&service.endpoint());
            Some(GroupService {
                name: service.pool.parse().ok()?,
                protocol: match service.protocol {
                    Protocol::Udp => TransportProtocol::Udp,
                    _ => TransportProtocol::Tcp,
                },
                address: service.address,
                serves: !service.is_ending && is_reached && is_served,
            })
        });
        feed.publish(services.collect());
    }

    /// Returns true if the service addresses have a contact node, as far as this node knows.
    fn reaches_contact(&self) -> bool {
        match self.group.is_contact() {
            _ if !reach_of(self.config.group.reach).has_contact_node() => true,
            true => self.has_lease(),
            false => self.peers.is_up(self.group.contact()),
        }
    }
}
