//! Round trips to elements and peers, from the transport.

use std::time::Duration;

use holdfast_proto::registrar::Protocol;
use holdfast_sys::transport::AssocId;

use super::event_loop::Daemon;
use super::links::{number, of_number};

/// Interval between measurements of some associations, and number of intervals in which each measured association has
/// one turn.
const TURN: Duration = Duration::from_millis(250);
const TURNS: usize = 20;

impl Daemon {
    /// Reports the measured round trips of some associations to the machine, and starts new measurements.
    pub(super) fn ask_round_trips(&mut self, now: Duration) {
        self.next_round_trips = now + TURN;
        for _ in 0..self.links.measured().div_ceil(TURNS) {
            let machine = &self.machine;
            let next = self.links.next_in_rota(|id| machine.measures(id));
            let Some(id) = next else {
                return;
            };
            let (protocol, assoc) = of_number(id);
            self.tell_round_trip(now, protocol, assoc);
            self.end(protocol).measure(assoc);
        }
    }

    pub(super) fn tell_round_trip(&mut self, now: Duration, protocol: Protocol, assoc: AssocId) {
        if let Ok(round_trip) = self.end(protocol).round_trip(assoc)
            && !round_trip.is_zero()
        {
            let id = number(protocol, assoc);
            self.machine.handle_round_trip(now, id, round_trip);
        }
    }
}
