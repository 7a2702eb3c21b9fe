//! The node's metrics for Prometheus. Names begin with `holdfast_` and end with their units.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use holdfast_api::control::HandoffCounts;
use holdfast_dns::{NameOwner, Outcome};
use holdfast_wire::authenticated_datagram::DatagramError;
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::load::{LoadName, NodeMeasurement, Report, ReportSubject};

mod load_metrics;
mod replication_metrics;
use load_metrics::LoadMetrics;
use replication_metrics::ReplicationMetrics;

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
struct NameLabel {
    name: String,
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

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ServerLabels {
    pool: String,
    service: String,
    node: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FailureLabels {
    pool: String,
    reason: &'static str,
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
    flows_disputed: Gauge,
    flows_in_transit: Family<DirectionLabel, Gauge>,
    hold_slots: Gauge,
    round_trip: Family<PeerLabel, FloatGauge>,
    connected: Family<PeerLabel, Gauge>,
    rejected: Family<ReasonLabel, Counter>,
    migrations: Family<OutcomeLabel, Counter>,
    migration_freeze: Histogram,
    load: LoadMetrics,
    replication: ReplicationMetrics,
    servers_well: Family<ServerLabels, Gauge>,
    server_failures: Family<FailureLabels, Counter>,
    group_epoch: Gauge,
    lease: Gauge,
    view_store: Gauge,
    takeovers: Counter,
    refused_datagrams: Family<ReasonLabel, Counter>,
    ignored_membership_frames: Counter,
    dns_queries: Family<NameLabel, Counter>,
    dns_responses: Family<OutcomeLabel, Counter>,
    certificate_end: Gauge,
    certificate_renewals: Family<OutcomeLabel, Counter>,
    enrolments: Family<OutcomeLabel, Counter>,
    revoked_certificates: Gauge,
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
            flows_disputed: Gauge::default(),
            flows_in_transit: Family::default(),
            hold_slots: Gauge::default(),
            round_trip: Family::default(),
            connected: Family::default(),
            rejected: Family::default(),
            migrations: Family::default(),
            migration_freeze: Histogram::new(MIGRATION_FREEZE_BUCKETS_S),
            load: LoadMetrics::default(),
            replication: ReplicationMetrics::default(),
            servers_well: Family::default(),
            server_failures: Family::default(),
            group_epoch: Gauge::default(),
            lease: Gauge::default(),
            view_store: Gauge::default(),
            takeovers: Counter::default(),
            refused_datagrams: Family::default(),
            ignored_membership_frames: Counter::default(),
            dns_queries: Family::default(),
            dns_responses: Family::default(),
            certificate_end: Gauge::default(),
            certificate_renewals: Family::default(),
            enrolments: Family::default(),
            revoked_certificates: Gauge::default(),
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
            (&self.enrolments, ["signed", "admitted", "refused"]),
        ] {
            for outcome in outcomes {
                drop(family.get_or_create(&OutcomeLabel { outcome }));
            }
        }
        for outcome in ["renewed", "failed"] {
            drop(
                self.certificate_renewals
                    .get_or_create(&OutcomeLabel { outcome }),
            );
        }
        for reason in DatagramError::LABELS {
            let reason = reason.to_owned();
            drop(
                self.refused_datagrams
                    .get_or_create(&ReasonLabel { reason }),
            );
        }
        self.set_in_transit(0, 0);
    }

    fn register_membership(&self, registry: &mut Registry) {
        registry.register(
            "group_epoch",
            "Epoch of the view that this node obeys, in a group that runs itself",
            self.group_epoch.clone(),
        );
        registry.register(
            "group_lease",
            "1 while this node is the contact node and has a lease",
            self.lease.clone(),
        );
        registry.register(
            "group_store_answers",
            "1 while the store of the group's views (group.store) answers this contact node or backup; 0 without such a store",
            self.view_store.clone(),
        );
        registry.register(
            "group_takeovers",
            "Times that this node stood for the place of a silent contact node",
            self.takeovers.clone(),
        );
        registry.register(
            "datagrams_refused",
            "Datagrams between nodes that were refused, by reason",
            self.refused_datagrams.clone(),
        );
        registry.register(
            "membership_frames_ignored",
            "Frames of the membership that came late, repeatedly or from strangers",
            self.ignored_membership_frames.clone(),
        );
    }

    fn register_servers(&self, registry: &mut Registry) {
        registry.register(
            "server_well",
            "1 if a node's server of a service may get new clients, as the contact node sees it",
            self.servers_well.clone(),
        );
        registry.register(
            "server_failures",
            "Times at which this node's server of a pool stopped serving new clients, by reason",
            self.server_failures.clone(),
        );
    }

    fn register_dns(&self, registry: &mut Registry) {
        registry.register(
            "dns_queries",
            "DNS queries for a name of the group, by name",
            self.dns_queries.clone(),
        );
        registry.register(
            "dns_responses",
            "DNS queries by outcome",
            self.dns_responses.clone(),
        );
    }

    fn register_credentials(&self, registry: &mut Registry) {
        registry.register_with_unit(
            "certificate_end_timestamp",
            "Unix time at which this node's certificate or its authority's ends",
            Unit::Seconds,
            self.certificate_end.clone(),
        );
        registry.register(
            "certificate_renewals",
            "Attempts to renew this node's certificate, by outcome",
            self.certificate_renewals.clone(),
        );
        registry.register(
            "enrolments",
            "Hosts that asked this node for a certificate, by outcome",
            self.enrolments.clone(),
        );
        registry.register(
            "revoked_certificates",
            "Certificates in the revocation lists in force",
            self.revoked_certificates.clone(),
        );
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
            "flows_disputed",
            "Flows that two nodes claim, at the contact node; neither gets their packets",
            self.flows_disputed.clone(),
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
        self.load.register(&mut registry);
        self.replication.register(&mut registry);
        self.register_servers(&mut registry);
        self.register_membership(&mut registry);
        self.register_dns(&mut registry);
        self.register_credentials(&mut registry);
        registry.register(
            "build_info",
            "Release of the daemon, always 1",
            self.build.clone(),
        );
        registry
    }

    /// Counts a DNS query. `name` must be a name of the group, since each name has a series.
    pub fn count_dns_query(&self, name: Option<&NameOwner>, outcome: Outcome) {
        if let Some(name) = name {
            let name = name.to_string();
            self.dns_queries.get_or_create(&NameLabel { name }).inc();
        }
        let outcome = outcome.name();
        self.dns_responses
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
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

    /// Sets the load of the node.
    pub fn set_load(&self, measured: &NodeMeasurement, share: f64) {
        self.load.set(measured, share);
    }

    /// Sets the loads that programs report; series of reports that have ended end.
    pub fn set_load_reports<'a>(
        &self,
        reports: impl Iterator<Item = (&'a ReportSubject, &'a LoadName, &'a Report)>,
    ) {
        self.load.set_reports(reports);
    }

    /// Records whether a node's server of a service may get new clients.
    pub fn set_server_well(&self, pool: &str, service: &str, node: &str, is_well: bool) {
        let labels = ServerLabels {
            pool: pool.to_owned(),
            service: service.to_owned(),
            node: node.to_owned(),
        };
        let gauge = self.servers_well.get_or_create_owned(&labels);
        gauge.set(i64::from(is_well));
    }

    /// Sets the figures of a service that this node replicates: sound and doubted legs, lag in bytes, connections.
    pub fn set_replication(&self, service: &str, legs: (i64, i64), lag: u64, connections: usize) {
        self.replication.set(service, legs, lag, connections);
    }

    /// Counts a replica of a service that has become the primary.
    pub fn count_replication_promotion(&self, service: &str) {
        self.replication.count_promotion(service);
    }

    /// Counts a leg of a service that no longer serves.
    pub fn count_dropped_leg(&self, service: &str, reason: &'static str) {
        self.replication.count_dropped_leg(service, reason);
    }

    /// Counts an output that differs from the primary's.
    pub fn count_divergence(&self, service: &str) {
        self.replication.count_divergence(service);
    }

    /// Sets the counter of a kind of packets of the replication programs.
    pub fn set_replication_packets(&self, kind: &'static str, count: u64) {
        self.replication.set_packets(kind, count);
    }

    /// Ends the series of a service that this node no longer replicates.
    pub fn forget_replication(&self, service: &str) {
        self.replication.forget(service);
    }

    /// Counts a failure of this node's server of a pool.
    pub fn count_server_failure(&self, pool: &str, reason: &'static str) {
        let pool = pool.to_owned();
        let labels = FailureLabels { pool, reason };
        self.server_failures.get_or_create(&labels).inc();
    }

    /// Ends the series of a node's server of a service.
    pub fn forget_server(&self, pool: &str, service: &str, node: &str) {
        self.servers_well.remove(&ServerLabels {
            pool: pool.to_owned(),
            service: service.to_owned(),
            node: node.to_owned(),
        });
    }

    /// Ends the series of the failures of this node's server of a pool.
    pub fn forget_server_failures(&self, pool: &str, reason: &'static str) {
        let pool = pool.to_owned();
        self.server_failures.remove(&FailureLabels { pool, reason });
    }

    /// Sets the time at which the certificates in use end.
    pub fn set_certificate_end(&self, end: SystemTime) {
        let since_epoch = end.duration_since(UNIX_EPOCH).unwrap_or_default();
        self.certificate_end
            .set(i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX));
    }

    /// Counts a host that asked for a certificate.
    pub fn count_enrolment(&self, outcome: &'static str) {
        self.enrolments
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
    }

    /// Returns the number of hosts that asked for a certificate with this outcome.
    pub fn enrolments(&self, outcome: &'static str) -> u64 {
        self.enrolments
            .get_or_create(&OutcomeLabel { outcome })
            .get()
    }

    /// Counts an attempt to renew this node's certificate.
    pub fn count_renewal(&self, outcome: &'static str) {
        self.certificate_renewals
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
    }

    /// Sets the number of certificates in the revocation lists in force.
    pub fn set_revoked_certificates(&self, certificates: usize) {
        self.revoked_certificates
            .set(i64::try_from(certificates).unwrap_or(i64::MAX));
    }

    /// Sets the epoch of the view that this node obeys.
    pub fn set_group_epoch(&self, epoch: u64) {
        self.group_epoch
            .set(i64::try_from(epoch).unwrap_or(i64::MAX));
    }

    /// Records whether this node has a lease.
    pub fn set_lease(&self, has_lease: bool) {
        self.lease.set(i64::from(has_lease));
    }

    /// Records whether the store of the group's views answers.
    pub fn set_view_store(&self, is_answering: bool) {
        self.view_store.set(i64::from(is_answering));
    }

    /// Counts a silent contact node that this node wants to replace.
    pub fn count_takeover(&self) {
        self.takeovers.inc();
    }

    /// Counts a refused datagram.
    pub fn count_refused_datagram(&self, reason: &str) {
        let reason = reason.to_owned();
        let refused = &self.refused_datagrams;
        refused.get_or_create_owned(&ReasonLabel { reason }).inc();
    }

    /// Returns the number of datagrams that were refused for `reason`.
    pub fn refused_datagrams(&self, reason: &str) -> u64 {
        let reason = reason.to_owned();
        let refused = &self.refused_datagrams;
        refused.get_or_create_owned(&ReasonLabel { reason }).get()
    }

    /// Counts a frame of the membership without effect.
    pub fn count_ignored_membership_frame(&self) {
        self.ignored_membership_frames.inc();
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

    /// Sets the number of flows that two nodes claim.
    pub fn set_flows_disputed(&self, flows: usize) {
        self.flows_disputed
            .set(i64::try_from(flows).unwrap_or(i64::MAX));
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

    /// Ends the series of a node that is not in the group any longer.
    pub fn forget_peer(&self, peer: &str) {
        let label = PeerLabel {
            peer: peer.to_owned(),
        };
        self.connected.remove(&label);
        self.round_trip.remove(&label);
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
        metrics.set_flows_disputed(2);
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
            "holdfast_flows_disputed 2",
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
        let report = Report::of_value(5.0);
        let name = "players".parse().expect("a name");
        metrics.set_load_reports([(&ReportSubject::Node, &name, &report)].into_iter());
        metrics.set_server_well("web", "tcp:10.0.0.1:80", "n2", true);
        metrics.count_server_failure("web", "listener_closed");
        metrics.set_replication("web", (2, 0), 0, 1);
        metrics.count_dropped_leg("web", "silent");
        metrics.set_replication_packets("clones", 1);
        let name = NameOwner::Below("web".parse().expect("a label"));
        metrics.count_dns_query(Some(&name), Outcome::Answered);
        let text = metrics.encode();
        let mut kinds = text.lines().filter_map(|line| {
            let mut words = line.strip_prefix("# TYPE ")?.split(' ');
            Some((words.next()?, words.next()?))
        });
        assert_eq!(kinds.clone().count(), 43, "{text}");
        let missing = kinds.find(|(name, kind)| {
            let suffix = if *kind == "counter" { "_total" } else { "" };
            ['`', '{']
                .iter()
                .all(|end| !page.contains(&format!("`{name}{suffix}{end}")))
        });
        assert_eq!(missing, None, "docs/metrics.md lacks a metric");
    }
}
