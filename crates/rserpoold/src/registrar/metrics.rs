//! Metrics of a registrar, made from its status for each request.

use holdfast_api::control::{PeerList, RegistrarStatus};
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VersionLabel {
    version: String,
}

/// Returns the metrics in OpenMetrics.
pub(super) fn encode(status: &RegistrarStatus, peers: &PeerList) -> String {
    let mut registry = Registry::with_prefix("holdfast_registrar");
    let active = peers.peers.iter().filter(|peer| peer.active).count() as u64;
    let gauges = [
        ("pools", "Pools", status.pools),
        (
            "elements",
            "Elements of all home registrars",
            status.elements,
        ),
        (
            "elements_own",
            "Elements whose home registrar this is",
            status.own_elements,
        ),
        ("associations", "SCTP associations", status.associations),
        ("peers_active", "Other registrars that answer", active),
    ];
    for (name, help, value) in gauges {
        let gauge: Gauge = Gauge::default();
        gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        registry.register(name, help, gauge);
    }
    for (name, help, value) in counters(status).into_iter().chain(refusal_counters(status)) {
        let counter: Counter = Counter::default();
        counter.inc_by(value);
        registry.register(name, help, counter);
    }
    let build: Family<VersionLabel, Gauge> = Family::default();
    let version = status.version.clone();
    build.get_or_create(&VersionLabel { version }).set(1);
    registry.register("build_info", "Release of the daemon, always 1", build);
    let mut encoded = String::new();
    // Writing to a string does not fail.
    let _ = text::encode(&mut encoded, &registry);
    encoded
}

fn counters(status: &RegistrarStatus) -> [(&'static str, &'static str, u64); 15] {
    let counted = &status.counters;
    [
        (
            "registrations",
            "First registrations",
            counted.registrations,
        ),
        (
            "reregistrations",
            "Repeated registrations",
            counted.reregistrations,
        ),
        ("refusals", "Registrations refused", counted.refusals),
        (
            "deregistrations",
            "Deregistrations",
            counted.deregistrations,
        ),
        ("resolutions", "Resolutions answered", counted.resolutions),
        (
            "resolutions_refused",
            "Resolutions refused",
            counted.resolutions_refused,
        ),
        ("keep_alives", "Keep-alives sent", counted.keep_alives),
        (
            "unreachable_reports",
            "Reports of unreachable elements",
            counted.unreachable_reports,
        ),
        (
            "updates_sent",
            "Updates sent to peers",
            counted.updates_sent,
        ),
        (
            "updates_received",
            "Updates from peers",
            counted.updates_received,
        ),
        (
            "resynchronisations",
            "Handle tables requested again",
            counted.resynchronisations,
        ),
        ("takeovers", "Registrars taken over", counted.takeovers),
        ("malformed", "Malformed messages", counted.malformed),
        (
            "limited",
            "Messages dropped by the rate limit",
            counted.rate_limited,
        ),
        (
            "sends_refused",
            "Messages that found no room in a send buffer",
            counted.sends_refused,
        ),
    ]
}

/// Returns the counters of refused and ignored requests.
fn refusal_counters(status: &RegistrarStatus) -> [(&'static str, &'static str, u64); 7] {
    let counted = &status.counters;
    [
        (
            "denied",
            "Messages refused by access rules",
            counted.access_denied,
        ),
        (
            "over_limit",
            "Registrations refused because of a limit",
            counted.limit_refusals,
        ),
        (
            "reports_ignored",
            "Reports of unreachable elements that were ignored",
            counted.reports_ignored,
        ),
        (
            "associations_refused",
            "Associations refused because there are too many",
            counted.associations_refused,
        ),
        (
            "connections_refused",
            "TCP connections refused",
            counted.connections_refused,
        ),
        (
            "aborted",
            "Associations aborted because of bad messages or silence",
            counted.associations_aborted,
        ),
        (
            "multicast_ignored",
            "Multicast datagrams ignored",
            counted.multicast_ignored,
        ),
    ]
}
