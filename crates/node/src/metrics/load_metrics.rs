//! Metrics of the load of the node and of reported loads.

use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::load::{LoadName, NodeMeasurement, Report, ReportSubject};

type FloatGauge = Gauge<f64, AtomicU64>;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelSet)]
struct ReportLabels {
    name: String,
    /// Empty for a report about the node as a whole.
    pid: String,
}

/// Gauges of the load, a part of the metrics of a node.
#[derive(Clone, Default)]
pub(super) struct LoadMetrics {
    share: FloatGauge,
    processors: FloatGauge,
    demand: FloatGauge,
    capacity: FloatGauge,
    waiting: FloatGauge,
    memory_used: FloatGauge,
    memory_free: FloatGauge,
    reports: Family<ReportLabels, FloatGauge>,
    /// Labels of the series of reports.
    series: Arc<Mutex<BTreeSet<ReportLabels>>>,
}

impl LoadMetrics {
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "load_ratio",
            "Load of the node that pool policies compare, 0 to 1",
            self.share.clone(),
        );
        registry.register(
            "load_processors_used",
            "Processors that the node's processes use",
            self.processors.clone(),
        );
        registry.register(
            "load_processors_wanted",
            "Processors that the node's processes would use if no process had to wait",
            self.demand.clone(),
        );
        registry.register(
            "load_processors_capacity",
            "Processors that the node has: the online ones, or fewer by the quota of its control group",
            self.capacity.clone(),
        );
        registry.register(
            "load_waiting_ratio",
            "Share of the time in which some process waited for a processor",
            self.waiting.clone(),
        );
        registry.register_with_unit(
            "load_memory_used",
            "Memory in use without files that the kernel can drop; 0 if the kernel counts none for this host",
            Unit::Bytes,
            self.memory_used.clone(),
        );
        registry.register_with_unit(
            "load_memory_free",
            "Memory that processes can still get",
            Unit::Bytes,
            self.memory_free.clone(),
        );
        registry.register(
            "load_reported",
            "Loads that programs report, by name and PID",
            self.reports.clone(),
        );
    }

    pub fn set(&self, measured: &NodeMeasurement, share: f64) {
        let processors = |millis: u32| f64::from(millis) / 1000.0;
        let bytes = |kib: u64| kib as f64 * 1024.0;
        self.share.set(share);
        self.processors.set(processors(measured.cpu_millis));
        self.demand.set(processors(measured.demand().used));
        self.capacity.set(processors(measured.capacity_millis));
        self.waiting.set(processors(measured.waiting_millis));
        self.memory_used
            .set(bytes(measured.memory_used_kib.unwrap_or(0)));
        self.memory_free.set(bytes(measured.memory_free_kib));
    }

    pub fn set_reports<'a>(
        &self,
        reports: impl Iterator<Item = (&'a ReportSubject, &'a LoadName, &'a Report)>,
    ) {
        let mut reported = BTreeSet::new();
        for (subject, name, report) in reports {
            let labels = ReportLabels {
                name: name.to_string(),
                pid: subject.pid().map_or(String::new(), |pid| pid.to_string()),
            };
            self.reports.get_or_create_owned(&labels).set(report.value);
            reported.insert(labels);
        }
        // Only the event loop sets reports: the lock is free, and a panic elsewhere cannot have poisoned it.
        let mut series = self.series.lock().unwrap_or_else(PoisonError::into_inner);
        for ended in series.difference(&reported) {
            self.reports.remove(ended);
        }
        *series = reported;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::encoding::text::encode;

    #[test]
    fn series_of_a_report_ends_with_the_report() {
        let metrics = LoadMetrics::default();
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let text = || {
            let mut text = String::new();
            encode(&mut text, &registry).expect("text");
            text
        };
        let (name, report) = ("players".parse().expect("a name"), Report::of_value(37.0));
        metrics.set_reports([(&ReportSubject::Node, &name, &report)].into_iter());
        let line = "load_reported{name=\"players\",pid=\"\"} 37.0\n";
        assert!(text().contains(line), "{}", text());
        metrics.set_reports(std::iter::empty());
        assert!(!text().contains("load_reported{"), "{}", text());
        let measured = NodeMeasurement {
            cpu_millis: 150,
            capacity_millis: 200,
            memory_free_kib: 1,
            ..NodeMeasurement::default()
        };
        metrics.set(&measured, 0.75);
        for line in [
            "load_ratio 0.75",
            "load_processors_used 0.15",
            "load_memory_free_bytes 1024.0",
        ] {
            assert!(
                text().lines().any(|other| other == line),
                "{line} is not in {}",
                text()
            );
        }
    }
}
