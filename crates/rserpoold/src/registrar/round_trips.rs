//! Round trips to elements and peers, from the transport.

use std::time::Duration;

use holdfast_proto::registrar::PoolProtocol;
use holdfast_sctp::AssocId;

use super::associations::{association_id, endpoint_of};
use super::event_loop::RegistrarEventLoop;

/// Interval between measurements of some associations, and number of intervals in which each measured association has
/// one turn.
const MEASURE_INTERVAL: Duration = Duration::from_millis(250);
const INTERVALS_PER_ROUND: usize = 20;

impl RegistrarEventLoop {
    /// Reports the measured round trips of some associations to the machine, and starts new measurements.
    pub(super) fn measure_round_trips(&mut self, now: Duration) {
        self.next_round_trip_check = now + MEASURE_INTERVAL;
        for _ in 0..self.links.rota_len().div_ceil(INTERVALS_PER_ROUND) {
            let machine = &self.machine;
            let next = self.links.next_in_rota(|id| machine.needs_measurement(id));
            let Some(id) = next else {
                return;
            };
            let (protocol, assoc) = endpoint_of(id);
            self.report_round_trip(now, protocol, assoc);
            self.endpoint(protocol).measure_round_trip(assoc);
        }
    }

    pub(super) fn report_round_trip(
        &mut self,
        now: Duration,
        protocol: PoolProtocol,
        assoc: AssocId,
    ) {
        if let Ok(round_trip) = self.endpoint(protocol).round_trip(assoc)
            && !round_trip.is_zero()
        {
            let id = association_id(protocol, assoc);
            self.machine.handle_round_trip(now, id, round_trip);
        }
    }
}
