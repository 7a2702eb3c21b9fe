//! Properties of the links: the file of `--topology` and its meaning for each host.

use std::{collections::BTreeMap, path::Path, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    address_plan::{HostKind, LabHost, MacAddress},
    error::{Error, ErrorContext, Result},
    link::{LOSS_ALWAYS, LinkConfig},
};

/// A topology: a list of entries about links. If two entries concern the same link, the later one overrides the earlier
/// one, field by field. A host without an entry has a plain link, without delay, limit or loss.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// The seed from which every link's own seed is derived, unless an entry gives one.
    #[serde(default)]
    pub seed: u64,
    /// Entries about links; a later entry overrides an earlier one.
    #[serde(default, rename = "link")]
    pub links: Vec<LinkEntry>,
}

/// One entry: some fields of some links.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkEntry {
    /// A host's name, or `nodes`, `clients`, `all`.
    pub host: String,
    /// The direction that the entry applies to.
    #[serde(default)]
    pub direction: Direction,
    /// Applies the delay only to packets from the host to this host, which must be in the same segment.
    pub toward: Option<String>,
    /// Delay in milliseconds.
    pub delay_ms: Option<f64>,
    /// Maximum addition to the delay in milliseconds, uniformly distributed; never changes the order.
    pub jitter_ms: Option<f64>,
    /// Rate in Mbit/s (10^6 bits per second of Ethernet frames).
    pub rate_mbit: Option<f64>,
    /// Maximum number of packets waiting for the transmitter.
    pub queue_packets: Option<usize>,
    /// Loss in percent of the packets.
    pub loss_pct: Option<f64>,
    /// Seed of losses and jitter.
    pub seed: Option<u64>,
    /// True if the kernel enforces the rate, which must then be the link's only property: the kernel uses far less
    /// processor time than the link program. Frames that an XDP program sends back leave a host without the rate limit.
    pub kernel: Option<bool>,
}

/// A direction of a link, from its host's view.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From the host to the switch.
    Up,
    /// From the switch to the host.
    Down,
    /// Both directions.
    #[default]
    Both,
}

/// Both directions of one host's link.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DuplexLinkConfig {
    /// From the host to the switch.
    pub up: LinkConfig,
    /// From the switch to the host.
    pub down: LinkConfig,
    /// The upward delay to these hosts, where it differs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub toward: Vec<(MacAddress, Duration)>,
    /// True if the kernel enforces the rates, the link's only properties.
    #[serde(default)]
    pub kernel: bool,
}

impl DuplexLinkConfig {
    /// Checks that a link enforced by the kernel has only properties that the kernel can enforce.
    fn check(&self, host: &str) -> Result<()> {
        let is_rate = |config: &LinkConfig| {
            let has_no_delay = config.delay.is_zero() && config.jitter.is_zero();
            config.rate_bits.is_some() && has_no_delay && config.loss == 0
        };
        if !self.kernel || (is_rate(&self.up) && is_rate(&self.down) && self.toward.is_empty()) {
            return Ok(());
        }
        Err(Error::Invalid(format!(
            "topology: the link of {host:?} has kernel = true, which requires rate_mbit for both directions, and \
             allows queue_packets but nothing else"
        )))
    }
}

impl Topology {
    /// Reads a topology from TOML.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the position, when the text is not a topology.
    pub fn parse(text: &str) -> Result<Topology> {
        toml::from_str(text).map_err(|error| Error::Invalid(format!("topology: {error}")))
    }

    /// Reads a topology from a TOML file.
    ///
    /// # Errors
    /// [`Error::Io`] when the file cannot be read, [`Error::Invalid`] when it is not a topology.
    pub fn read(path: &Path) -> Result<Topology> {
        let text = std::fs::read_to_string(path)
            .context(|| format!("read topology {}", path.display()))?;
        Topology::parse(&text)
    }

    /// Returns the topology with one more entry at its end.
    #[must_use]
    pub fn with_entry(mut self, entry: LinkEntry) -> Topology {
        self.links.push(entry);
        self
    }

    /// Returns the links that are not plain, by host.
    ///
    /// # Errors
    /// [`Error::Invalid`] when an entry names no host of the lab, or a value is out of range.
    pub fn resolve(&self, hosts: &[LabHost]) -> Result<BTreeMap<String, DuplexLinkConfig>> {
        let mut links = BTreeMap::<String, DuplexLinkConfig>::new();
        for entry in &self.links {
            let matching_hosts: Vec<_> =
                hosts.iter().filter(|host| entry.applies_to(host)).collect();
            if matching_hosts.is_empty()
                && !matches!(entry.host.as_str(), "all" | "nodes" | "clients")
            {
                return Err(Error::Invalid(format!(
                    "topology: there is no host {:?}",
                    entry.host
                )));
            }
            for host in matching_hosts {
                let plain = || self.default_link(host);
                let duplex = links.entry(host.name.clone()).or_insert_with(plain);
                match &entry.toward {
                    Some(other) => duplex.toward.push(entry.delay_toward(host, other, hosts)?),
                    None => entry.apply_to_link(duplex)?,
                }
            }
        }
        for (host, duplex) in &links {
            duplex.check(host)?;
        }
        Ok(links)
    }

    fn default_link(&self, host: &LabHost) -> DuplexLinkConfig {
        let seeded = |direction: u64| LinkConfig {
            seed: link_seed(self.seed, host, direction),
            ..LinkConfig::default()
        };
        DuplexLinkConfig {
            up: seeded(0),
            down: seeded(1),
            toward: Vec::new(),
            kernel: false,
        }
    }
}

impl LinkEntry {
    /// Returns an entry about `host` without any field set.
    #[must_use]
    pub fn for_host(host: &str) -> LinkEntry {
        LinkEntry {
            host: host.into(),
            ..LinkEntry::default()
        }
    }

    fn applies_to(&self, host: &LabHost) -> bool {
        match self.host.as_str() {
            "all" => true,
            "nodes" => host.kind == HostKind::Node,
            "clients" => host.kind == HostKind::Client,
            name => name == host.name,
        }
    }

    /// Returns the delay from one host to another.
    fn delay_toward(
        &self,
        host: &LabHost,
        other: &str,
        hosts: &[LabHost],
    ) -> Result<(MacAddress, Duration)> {
        let wrong = |what| {
            Err(Error::Invalid(format!(
                "topology: toward {other:?}: {what}"
            )))
        };
        let Some(other) = hosts.iter().find(|host| host.name == other) else {
            return wrong("there is no such host");
        };
        if other.segment != host.segment {
            return wrong("it is on another segment");
        }
        let Some(delay) = self.delay_ms else {
            return wrong("delay_ms is missing");
        };
        let plain = LinkEntry {
            host: self.host.clone(),
            toward: self.toward.clone(),
            delay_ms: self.delay_ms,
            ..LinkEntry::default()
        };
        if *self != plain {
            return wrong("only delay_ms can be combined with toward");
        }
        Ok((other.mac, milliseconds("delay_ms", delay)?))
    }

    fn apply_to_link(&self, duplex: &mut DuplexLinkConfig) -> Result<()> {
        duplex.kernel = self.kernel.unwrap_or(duplex.kernel);
        if self.direction != Direction::Down {
            self.apply_to_direction(&mut duplex.up)?;
        }
        if self.direction != Direction::Up {
            self.apply_to_direction(&mut duplex.down)?;
        }
        Ok(())
    }

    fn apply_to_direction(&self, config: &mut LinkConfig) -> Result<()> {
        if let Some(delay) = self.delay_ms {
            config.delay = milliseconds("delay_ms", delay)?;
        }
        if let Some(jitter) = self.jitter_ms {
            config.jitter = milliseconds("jitter_ms", jitter)?;
        }
        if let Some(rate) = self.rate_mbit {
            let rate = in_range("rate_mbit", rate, 0.001, 1e6)?;
            config.rate_bits = Some((rate * 1e6).round() as u64);
        }
        if let Some(queue) = self.queue_packets {
            config.queue_packets = in_range("queue_packets", queue as f64, 1.0, 1e6)? as usize;
        }
        if let Some(loss) = self.loss_pct {
            let loss = in_range("loss_pct", loss, 0.0, 100.0)?;
            config.loss = (loss / 100.0 * LOSS_ALWAYS as f64).round() as u64;
        }
        if let Some(seed) = self.seed {
            config.seed = seed;
        }
        Ok(())
    }
}

/// Returns a seed that differs for each host and direction, and is always the same.
fn link_seed(seed: u64, host: &LabHost, direction: u64) -> u64 {
    let [_, _, _, _, group, index] = host.mac.0.map(u64::from);
    seed.wrapping_mul(0x0100_0000_01b3) ^ (group << 16 | index << 1 | direction)
}

fn milliseconds(what: &str, value: f64) -> Result<Duration> {
    Ok(Duration::from_secs_f64(
        in_range(what, value, 0.0, 60_000.0)? / 1000.0,
    ))
}

fn in_range(what: &str, value: f64, low: f64, high: f64) -> Result<f64> {
    if (low..=high).contains(&value) {
        return Ok(value);
    }
    Err(Error::Invalid(format!(
        "{what} must be {low} to {high}, not {value}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address_plan::AddressPlan;

    fn hosts() -> Vec<LabHost> {
        AddressPlan::new(0, 2, 1, 1).unwrap().hosts()
    }

    #[test]
    fn later_entries_override_single_fields() {
        let text = r#"
            seed = 5
            [[link]]
            host = "all"
            delay_ms = 10
            loss_pct = 50
            [[link]]
            host = "n1"
            direction = "up"
            delay_ms = 2.5
            rate_mbit = 100
            queue_packets = 20
            seed = 77
        "#;
        let links = Topology::parse(text).unwrap().resolve(&hosts()).unwrap();
        assert_eq!(links.len(), 3);
        let n1 = &links["n1"];
        assert_eq!(n1.up.delay, Duration::from_micros(2500));
        assert_eq!(n1.up.rate_bits, Some(100_000_000));
        assert_eq!((n1.up.queue_packets, n1.up.seed), (20, 77));
        assert_eq!(n1.up.loss, LOSS_ALWAYS / 2);
        assert_eq!(
            (n1.down.delay, n1.down.rate_bits),
            (Duration::from_millis(10), None)
        );
    }

    #[test]
    fn delay_toward_one_host_may_be_longer() {
        let hosts = hosts();
        let apart = LinkEntry {
            toward: Some("n2".into()),
            delay_ms: Some(30.0),
            ..LinkEntry::for_host("n1")
        };
        let links = Topology::default()
            .with_entry(apart)
            .resolve(&hosts)
            .unwrap();
        let delay = Duration::from_millis(30);
        assert_eq!(links["n1"].toward, [(hosts[1].mac, delay)]);
        assert_eq!(links["n1"].up.delay, Duration::ZERO);
    }

    #[test]
    fn each_link_has_its_own_seed() {
        let links = Topology::default()
            .with_entry(LinkEntry::for_host("all"))
            .resolve(&hosts())
            .unwrap();
        let mut seeds: Vec<_> = links
            .values()
            .flat_map(|d| [d.up.seed, d.down.seed])
            .collect();
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len(), 6);
    }

    #[test]
    fn host_without_entry_has_default_link() {
        let links = Topology::default()
            .with_entry(LinkEntry::for_host("clients"))
            .resolve(&hosts())
            .unwrap();
        assert_eq!(links.keys().collect::<Vec<_>>(), ["c1"]);
    }

    #[test]
    fn invalid_topologies_are_refused_with_reason() {
        for (text, names) in [
            ("[[link]]\nhost = 'n9'", "n9"),
            ("[[link]]\nhost = 'n1'\nloss_pct = 101", "loss_pct"),
            ("[[link]]\nhost = 'n1'\nrate_mbit = 0", "rate_mbit"),
            ("[[link]]\nhost = 'n1'\ndelay_ms = nan", "delay_ms"),
            ("[[link]]\nhost = 'n1'\nqueue_packets = 0", "queue_packets"),
            ("[[link]]\nhost = 'n1'\ndely_ms = 1", "dely_ms"),
            ("[[link]]\nhost = 'n1'\ndirection = 'left'", "direction"),
            (
                "[[link]]\nhost = 'n1'\ntoward = 'n9'\ndelay_ms = 1",
                "no such host",
            ),
            ("[[link]]\nhost = 'n1'\ntoward = 'n2'", "missing"),
            (
                "[[link]]\nhost = 'n1'\ntoward = 'n2'\ndelay_ms = 1\nloss_pct = 1",
                "only delay_ms",
            ),
            ("[[link]]\nhost = 'n1'\nkernel = true", "rate_mbit"),
            (
                "[[link]]\nhost = 'n1'\nkernel = true\nrate_mbit = 1\nloss_pct = 1",
                "nothing else",
            ),
            (
                "[[link]]\nhost = 'n1'\nkernel = true\nrate_mbit = 1\ndirection = 'up'",
                "both directions",
            ),
        ] {
            let error = Topology::parse(text)
                .and_then(|t| t.resolve(&hosts()))
                .unwrap_err();
            assert!(error.to_string().contains(names), "{text}: {error}");
        }
    }

    #[test]
    fn documented_example_parses_to_documented_values() {
        let page = include_str!("../../../docs/lab.md");
        let (_, rest) = page.split_once("```toml\n").unwrap();
        let (example, _) = rest.split_once("```").unwrap();
        let links = Topology::parse(example).unwrap().resolve(&hosts()).unwrap();
        let c1 = &links["c1"];
        assert_eq!(
            (c1.up.delay, c1.down.delay),
            (Duration::from_millis(10), Duration::from_millis(10))
        );
        assert_eq!((c1.up.queue_packets, c1.down.queue_packets), (50, 1000));
        assert_eq!((c1.up.seed, c1.down.loss), (7, 0));
    }
}
