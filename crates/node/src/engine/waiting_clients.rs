//! New clients that reach a contact node before it serves, or after it has served: their first packets wait in the hold until
//! there is a contact node that places them. A client whose first packet is dropped repeats it only a second later.

use std::collections::VecDeque;
use std::time::Duration;

use holdfast_bpf::SteeringVerdict;
use holdfast_bpf::shared_with_c::{NEW_CLIENTS_SLOT, ROLE_FORMER_HOLDER, ROLE_HOLDER};
use holdfast_sys::packet::send_frame;

use super::Engine;
use crate::dataplane::HeldPacket;

/// Time after which a client has repeated its first packet (RFC 6298 section 2), in the daemon's time.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// First packets of new clients, in their order of arrival. The ingress filter bounds their number.
#[derive(Default)]
pub struct WaitingClients(VecDeque<(Duration, HeldPacket)>);

impl WaitingClients {
    fn add(&mut self, now: Duration, packet: HeldPacket) {
        self.0.push_back((now, packet));
    }

    /// Removes the packets of clients that have repeated theirs, and returns their number.
    fn drop_old(&mut self, now: Duration) -> usize {
        let is_old = |(at, _): &(Duration, HeldPacket)| now.saturating_sub(*at) >= WAIT_MAX;
        let old_count = self.0.iter().take_while(|waiting| is_old(waiting)).count();
        self.0.drain(..old_count);
        old_count
    }

    fn take_first(&mut self) -> Option<HeldPacket> {
        self.0.pop_front().map(|(_, packet)| packet)
    }
}

impl Engine {
    /// Handles the first packet of a new client that the ingress filter has kept, because this contact node did not serve.
    pub(super) fn on_waiting_client(&mut self, packet: HeldPacket) {
        let now = self.now();
        self.waiting_clients.add(now, packet);
        self.steer_waiting_clients();
    }

    /// Returns true if the steering program has a node for new clients: a contact node needs a lease and its table.
    fn can_steer_clients(&self) -> bool {
        match self.steering_role() {
            ROLE_HOLDER => self.has_lease() && self.table_rebuild.is_ready(),
            role => role == ROLE_FORMER_HOLDER,
        }
    }

    /// Has the steering program decide about the waiting clients, if it can: this contact node places them, and a former one
    /// sends them to its successor.
    pub(super) fn steer_waiting_clients(&mut self) {
        self.drop_repeated_clients();
        while self.can_steer_clients()
            && let Some(packet) = self.waiting_clients.take_first()
        {
            let counters = &self.dataplane.programs.hold_counters;
            counters.count_replayed(NEW_CLIENTS_SLOT);
            let verdict = packet
                .to_frame()
                .map(|frame| self.dataplane.programs.steer(&frame));
            match verdict {
                Some(Ok(SteeringVerdict::ToStack)) => self.hold.device().replay(&packet.bytes),
                Some(Ok(SteeringVerdict::Forwarded { frame, interface })) => {
                    if let Err(error) = send_frame(interface, &frame) {
                        tracing::debug!(%error, "cannot forward a new client");
                    }
                }
                Some(Ok(SteeringVerdict::Dropped)) | None => {}
                Some(Err(error)) => tracing::warn!(%error, "cannot steer a new client"),
            }
        }
    }

    /// Forgets the clients that have repeated their first packets.
    pub(super) fn drop_repeated_clients(&mut self) {
        let now = self.now();
        for _ in 0..self.waiting_clients.drop_old(now) {
            let counters = &self.dataplane.programs.hold_counters;
            counters.count_replayed(NEW_CLIENTS_SLOT);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_that_have_repeated_their_packets_are_dropped() {
        let mut waiting = WaitingClients::default();
        let packet = |number| HeldPacket {
            bytes: vec![number],
            segment: None,
        };
        for number in 0..4 {
            waiting.add(
                Duration::from_millis(400 * u64::from(number)),
                packet(number),
            );
        }
        assert_eq!(waiting.drop_old(Duration::from_millis(1400)), 2);
        let left = std::iter::from_fn(|| waiting.take_first());
        let left: Vec<u8> = left.map(|packet| packet.bytes[0]).collect();
        assert_eq!(left, [2, 3]);
        assert_eq!(waiting.drop_old(Duration::from_secs(9)), 0);
    }
}
