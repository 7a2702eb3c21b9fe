//! Metrics of replicated services.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ServiceLabel {
    service: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LegsLabels {
    service: String,
    standing: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DropLabels {
    service: String,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

/// Gauges and counters of replicated services, a part of the metrics of a node.
#[derive(Clone, Default)]
pub(super) struct ReplicationMetrics {
    legs: Family<LegsLabels, Gauge>,
    lag: Family<ServiceLabel, Gauge>,
    connections: Family<ServiceLabel, Gauge>,
    promotions: Family<ServiceLabel, Counter>,
    dropped_legs: Family<DropLabels, Counter>,
    divergences: Family<ServiceLabel, Counter>,
    packets: Family<KindLabel, Counter>,
    /// Reasons with a series, by service.
    reasons: Arc<Mutex<BTreeMap<String, Vec<&'static str>>>>,
}

impl ReplicationMetrics {
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "replication_legs",
            "Legs of a service that this node replicates, by confidence: sound or doubted",
            self.legs.clone(),
        );
        registry.register(
            "replication_lag_bytes",
            "Bytes that the slowest leg of a service lacks, in all connections together",
            self.lag.clone(),
        );
        registry.register(
            "replication_connections",
            "Replicated connections of a service",
            self.connections.clone(),
        );
        registry.register(
            "replication_promotions",
            "Replicas of a service that became the primary",
            self.promotions.clone(),
        );
        registry.register(
            "replication_dropped_legs",
            "Legs of a service that were dropped, by reason",
            self.dropped_legs.clone(),
        );
        registry.register(
            "replication_divergences",
            "Outputs of a service's replicas that differed from the primary's",
            self.divergences.clone(),
        );
        registry.register(
            "replication_packets",
            "Packets and decisions of the replication programs, by kind",
            self.packets.clone(),
        );
    }

    /// Sets the number of sound and of doubted legs, the lag, and the number of connections.
    pub fn set(&self, service: &str, (sound, doubted): (i64, i64), lag: u64, connections: usize) {
        let label = ServiceLabel {
            service: service.to_owned(),
        };
        for (standing, count) in [("sound", sound), ("doubted", doubted)] {
            let labels = LegsLabels {
                service: service.to_owned(),
                standing,
            };
            self.legs.get_or_create(&labels).set(count);
        }
        let lag = i64::try_from(lag).unwrap_or(i64::MAX);
        self.lag.get_or_create(&label).set(lag);
        self.connections
            .get_or_create(&label)
            .set(connections as i64);
        drop(self.promotions.get_or_create(&label));
        drop(self.divergences.get_or_create(&label));
    }

    pub fn count_promotion(&self, service: &str) {
        let service = service.to_owned();
        self.promotions
            .get_or_create(&ServiceLabel { service })
            .inc();
    }

    pub fn count_dropped_leg(&self, service: &str, reason: &'static str) {
        let labels = DropLabels {
            service: service.to_owned(),
            reason,
        };
        self.dropped_legs.get_or_create(&labels).inc();
        let mut reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        reasons.entry(labels.service).or_default().push(reason);
    }

    pub fn count_divergence(&self, service: &str) {
        let service = service.to_owned();
        self.divergences
            .get_or_create(&ServiceLabel { service })
            .inc();
    }

    pub fn set_packets(&self, kind: &'static str, count: u64) {
        let counter = self.packets.get_or_create_owned(&KindLabel { kind });
        counter.inc_by(count.saturating_sub(counter.get()));
    }

    /// Ends the series of a service.
    pub fn forget(&self, service: &str) {
        let label = ServiceLabel {
            service: service.to_owned(),
        };
        self.lag.remove(&label);
        self.connections.remove(&label);
        self.promotions.remove(&label);
        self.divergences.remove(&label);
        for standing in ["sound", "doubted"] {
            self.legs.remove(&LegsLabels {
                service: service.to_owned(),
                standing,
            });
        }
        let mut reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        for reason in reasons.remove(service).unwrap_or_default() {
            self.dropped_legs.remove(&DropLabels {
                service: service.to_owned(),
                reason,
            });
        }
    }
}
