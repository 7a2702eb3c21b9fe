//! The node's metrics for Prometheus. Names begin with `holdfast_` and end with their units.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use holdfast_api::control::HandoffCounts;
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// Upper bounds of the freeze histogram's buckets in seconds: dense around the bars of `bench handoff` (400 us, 2 ms, 3
/// ms).
const FREEZE_BUCKETS_S: [f64; 14] = [
    0.000_1, 0.000_2, 0.000_3, 0.000_4, 0.000_6, 0.001, 0.002, 0.003, 0.005, 0.01, 0.03, 0.1, 0.3,
    1.0,
];

/// Upper bounds of the buckets for freezes of processes, in seconds.
const MIGRATION_FREEZE_BUCKETS_S: [f64; 12] = [
    0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 3.0, 10.0,
];

type FloatGauge = Gauge<f64, AtomicU64>;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DirectionLabel {
    direction: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VersionLabel {
    version: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PeerLabel {
    peer: String,
}

/// The end of one flow's handoff, as this node counts the flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountedHandoff {
    /// The flow was given to another node.
    Moved,
    /// The flow stayed because the handoff failed.
    Kept,
    /// The flow was taken from another node.
    Accepted,
}

impl CountedHandoff {
    fn label(self) -> OutcomeLabel {
        let outcome = match self {
            CountedHandoff::Moved => "moved",
            CountedHandoff::Kept => "kept",
            CountedHandoff::Accepted => "accepted",
        };
        OutcomeLabel { outcome }
    }
}

/// The daemon's metrics. Clones share their values.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    handoffs: Family<OutcomeLabel, Counter>,
    freeze: Histogram,
    drops: Family<ReasonLabel, Counter>,
    flows_owned: Gauge,
    flow_table_full: Gauge,
    flows_in_transit: Family<DirectionLabel, Gauge>,
    hold_slots: Gauge,
    round_trip: Family<PeerLabel, FloatGauge>,
    connected: Family<PeerLabel, Gauge>,
    rejected: Family<ReasonLabel, Counter>,
    migrations: Family<OutcomeLabel, Counter>,
    migration_freeze: Histogram,
    certificate_end: Gauge,
    build: Family<VersionLabel, Gauge>,
}

impl Default for Metrics {
    fn default() -> Self {
        Metrics::new()
    }
}

impl Metrics {
    /// Creates metrics that are all zero.
    pub fn new() -> Metrics {
        let mut metrics = Metrics {
            registry: Arc::default(),
            handoffs: Family::default(),
            freeze: Histogram::new(FREEZE_BUCKETS_S),
            drops: Family::default(),
            flows_owned: Gauge::default(),
            flow_table_full: Gauge::default(),
            flows_in_transit: Family::default(),
            hold_slots: Gauge::default(),
            round_trip: Family::default(),
            connected: Family::default(),
            rejected: Family::default(),
            migrations: Family::default(),
            migration_freeze: Histogram::new(MIGRATION_FREEZE_BUCKETS_S),
            certificate_end: Gauge::default(),
            build: Family::default(),
        };
        let version = env!("CARGO_PKG_VERSION");
        metrics
            .build
            .get_or_create(&VersionLabel { version })
            .set(1);
        metrics.create_labelled_series();
        metrics.registry = Arc::new(metrics.register());
        metrics
    }

    /// Creates the series whose labels are known at zero, so that their first event is an increase.
    fn create_labelled_series(&self) {
        for (family, outcomes) in [
            (&self.handoffs, ["moved", "kept", "accepted"]),
            (&self.migrations, ["moved", "kept", "cloned"]),
        ] {
            for outcome in outcomes {
                drop(family.get_or_create(&OutcomeLabel { outcome }));
            }
        }
        self.set_in_transit(0, 0);
    }

    fn register(&self) -> Registry {
        let mut registry = Registry::with_prefix("holdfast");
        registry.register(
            "handoffs",
            "Flows whose handoff ended, by outcome",
            self.handoffs.clone(),
        );
        registry.register_with_unit(
            "freeze",
            "Time during which neither donor nor acceptor could serve a flow",
            Unit::Seconds,
            self.freeze.clone(),
        );
        registry.register(
            "drops",
            "Packets the data plane dropped, by reason",
            self.drops.clone(),
        );
        registry.register(
            "flows_owned",
            "Flows this node owns",
            self.flows_owned.clone(),
        );
        registry.register(
            "flow_table_full",
            "1 if a new flow had no room in the flow table within the last minute",
            self.flow_table_full.clone(),
        );
        registry.register(
            "flows_in_transit",
            "Flows in a handoff from or to this node, by direction",
            self.flows_in_transit.clone(),
        );
        registry.register(
            "hold_slots",
            "Hold counters in use, one for each flow in transit to this node",
            self.hold_slots.clone(),
        );
        registry.register_with_unit(
            "peer_round_trip",
            "Smoothed round trip to a peer's daemon",
            Unit::Seconds,
            self.round_trip.clone(),
        );
        registry.register(
            "peer_connected",
            "Whether the channel to a peer is up",
            self.connected.clone(),
        );
        registry.register(
            "frames_rejected",
            "Connections between nodes closed because of the data that the peer sent, by reason",
            self.rejected.clone(),
        );
        registry.register(
            "migrations",
            "Migrations of processes from this node that ended, by outcome",
            self.migrations.clone(),
        );
        registry.register_with_unit(
            "migration_freeze",
            "Time during which a process that moved from this node could not run",
            Unit::Seconds,
            self.migration_freeze.clone(),
        );
        registry.register_with_unit(
            "certificate_end_timestamp",
            "Unix time at which this node's certificate or its authority's ends",
            Unit::Seconds,
            self.certificate_end.clone(),
        );
        registry.register(
            "build_info",
            "Release of the daemon, always 1",
            self.build.clone(),
        );
        registry
    }

    /// Counts the end of one flow's handoff.
    pub fn count_handoff(&self, outcome: CountedHandoff) {
        self.handoffs.get_or_create(&outcome.label()).inc();
    }

    /// Returns the numbers of flows whose handoff has ended.
    pub fn handoff_counts(&self) -> HandoffCounts {
        let count = |outcome: CountedHandoff| {
            let counter = self.handoffs.get(&outcome.label());
            counter.map_or(0, |counter| counter.get())
        };
        HandoffCounts {
            donated: count(CountedHandoff::Moved),
            accepted: count(CountedHandoff::Accepted),
            kept: count(CountedHandoff::Kept),
        }
    }

    /// Records the freeze of one batch of flows.
    pub fn record_freeze(&self, freeze: Duration) {
        self.freeze.observe(freeze.as_secs_f64());
    }

    /// Counts the end of a migration from this node, as `moved`, `cloned` or `kept`.
    pub fn count_migration(&self, outcome: &'static str) {
        self.migrations
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
    }

    /// Records the freeze of a process that moved from this node.
    pub fn record_migration_freeze(&self, freeze: Duration) {
        self.migration_freeze.observe(freeze.as_secs_f64());
    }

    /// Sets the time at which the certificates in use end.
    pub fn set_certificate_end(&self, end: SystemTime) {
        let since_epoch = end.duration_since(UNIX_EPOCH).unwrap_or_default();
        self.certificate_end
            .set(i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX));
    }

    /// Sets the number of packets that the data plane has dropped for `reason` in total.
    pub fn set_drops(&self, reason: &str, packets: u64) {
        let reason = reason.to_owned();
        let counter = self.drops.get_or_create_owned(&ReasonLabel { reason });
        counter.inner().store(packets, Ordering::Relaxed);
    }

    /// Sets the number of flows that this node owns.
    pub fn set_flows_owned(&self, flows: u64) {
        self.flows_owned
            .set(i64::try_from(flows).unwrap_or(i64::MAX));
    }

    /// Records whether the flow table is full for new flows.
    pub fn set_flow_table_full(&self, full: bool) {
        self.flow_table_full.set(i64::from(full));
    }

    /// Sets the numbers of flows being handed off from this node and to it.
    pub fn set_in_transit(&self, outbound: usize, inbound: usize) {
        for (direction, flows) in [("out", outbound), ("in", inbound)] {
            let gauge = self
                .flows_in_transit
                .get_or_create_owned(&DirectionLabel { direction });
            gauge.set(i64::try_from(flows).unwrap_or(i64::MAX));
        }
    }

    /// Sets the number of hold slots in use.
    pub fn set_hold_slots(&self, slots: usize) {
        self.hold_slots
            .set(i64::try_from(slots).unwrap_or(i64::MAX));
    }

    /// Sets the smoothed round trip to `peer`.
    pub fn set_round_trip(&self, peer: &str, round_trip: Duration) {
        let peer = peer.to_owned();
        let gauge = self.round_trip.get_or_create_owned(&PeerLabel { peer });
        gauge.set(round_trip.as_secs_f64());
    }

    /// Records whether the channel to `peer` is up.
    pub fn set_connected(&self, peer: &str, up: bool) {
        let peer = peer.to_owned();
        let gauge = self.connected.get_or_create_owned(&PeerLabel { peer });
        gauge.set(i64::from(up));
    }

    /// Counts a connection between nodes that was closed because of the other side's data.
    pub fn count_rejection(&self, reason: &str) {
        let reason = reason.to_owned();
        self.rejected.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// Returns the number of connections between nodes that were closed for `reason`.
    pub fn rejections(&self, reason: &str) -> u64 {
        let reason = reason.to_owned();
        self.rejected.get_or_create(&ReasonLabel { reason }).get()
    }

    /// Returns all metrics in OpenMetrics.
    pub fn encode(&self) -> String {
        let mut text = String::new();
        // Writing to memory cannot fail.
        let _ = text::encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_in_the_text() {
        let metrics = Metrics::new();
        metrics.count_handoff(CountedHandoff::Moved);
        metrics.count_handoff(CountedHandoff::Moved);
        metrics.record_freeze(Duration::from_micros(350));
        metrics.set_drops("not_owner", 7);
        metrics.set_drops("not_owner", 9);
        metrics.set_flows_owned(3);
        metrics.set_round_trip("n2", Duration::from_micros(120));
        metrics.set_connected("n2", true);
        metrics.count_rejection("malformed");
        metrics.count_migration("moved");
        metrics.record_migration_freeze(Duration::from_millis(4));
        metrics.set_certificate_end(UNIX_EPOCH + Duration::from_secs(2_000_000_000));
        let text = metrics.clone().encode();
        for line in [
            "holdfast_handoffs_total{outcome=\"moved\"} 2",
            "holdfast_freeze_seconds_bucket{le=\"0.0003\"} 0",
            "holdfast_freeze_seconds_bucket{le=\"0.0004\"} 1",
            "holdfast_freeze_seconds_count 1",
            "holdfast_drops_total{reason=\"not_owner\"} 9",
            "holdfast_flows_owned 3",
            "holdfast_peer_round_trip_seconds{peer=\"n2\"} 0.00012",
            "holdfast_peer_connected{peer=\"n2\"} 1",
            "holdfast_frames_rejected_total{reason=\"malformed\"} 1",
            "holdfast_migrations_total{outcome=\"moved\"} 1",
            "holdfast_migration_freeze_seconds_count 1",
            "holdfast_certificate_end_timestamp_seconds 2000000000",
            concat!(
                "holdfast_build_info{version=\"",
                env!("CARGO_PKG_VERSION"),
                "\"} 1"
            ),
        ] {
            assert!(
                text.lines().any(|other| other == line),
                "{line} is not in\n{text}"
            );
        }
        assert_eq!(metrics.rejections("malformed"), 1);
        let counts = HandoffCounts {
            donated: 2,
            ..HandoffCounts::default()
        };
        assert_eq!(metrics.handoff_counts(), counts);
    }

    #[test]
    fn every_metric_is_documented() {
        let page = include_str!("../../../docs/metrics.md");
        let metrics = Metrics::new();
        metrics.set_drops("not_owner", 7);
        metrics.set_round_trip("n2", Duration::from_micros(120));
        metrics.set_connected("n2", true);
        metrics.count_rejection("malformed");
        let text = metrics.encode();
        let mut kinds = text.lines().filter_map(|line| {
            let mut words = line.strip_prefix("# TYPE ")?.split(' ');
            Some((words.next()?, words.next()?))
        });
        assert_eq!(kinds.clone().count(), 14, "{text}");
        let missing = kinds.find(|(name, kind)| {
            let suffix = if *kind == "counter" { "_total" } else { "" };
            ['`', '{']
                .iter()
                .all(|end| !page.contains(&format!("`{name}{suffix}{end}")))
        });
        assert_eq!(missing, None, "docs/metrics.md lacks a metric");
    }
}
