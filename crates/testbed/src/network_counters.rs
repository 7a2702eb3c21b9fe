//! The kernels' own counters of resets and retransmissions, summed over every host of a lab.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use holdfast_lab::Lab;

use crate::cluster::Cluster;

/// Counters since some start.
#[derive(Debug, Default, Clone, Copy)]
pub struct NetworkCounters {
    /// Segments with RST sent.
    pub resets: u64,
    /// Segments sent again, including tail-loss probes.
    pub retransmits: u64,
    /// Tail-loss probes.
    pub loss_probes: u64,
    /// Retransmission timeouts.
    pub timeouts: u64,
}

impl NetworkCounters {
    /// Returns the current counters of all hosts.
    ///
    /// # Errors
    /// A host does not exist any more.
    pub fn read(cluster: &Cluster) -> Result<Self> {
        let mut all = Self::default();
        for host in cluster.lab().hosts() {
            let values = read_host(cluster.lab(), &host.name)?;
            let value_of = |name: &str| values.get(name).copied().unwrap_or(0);
            all.resets += value_of("Tcp.OutRsts");
            all.retransmits += value_of("Tcp.RetransSegs");
            all.loss_probes += value_of("TcpExt.TCPLossProbes");
            all.timeouts += value_of("TcpExt.TCPTimeouts");
        }
        Ok(all)
    }

    /// Returns the increase since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            resets: self.resets - earlier.resets,
            retransmits: self.retransmits - earlier.retransmits,
            loss_probes: self.loss_probes - earlier.loss_probes,
            timeouts: self.timeouts - earlier.timeouts,
        }
    }
}

/// Returns all counters of a host's protocols, such as `Tcp.OutRsts`.
///
/// # Errors
/// The host does not exist any more.
pub fn read_host(lab: &Lab, host: &str) -> Result<BTreeMap<String, u64>> {
    let pid = lab.init_process(host)?;
    let mut values = BTreeMap::new();
    for file in ["snmp", "netstat"] {
        let path = format!("/proc/{pid}/net/{file}");
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        parse_counters(&text, &mut values);
    }
    Ok(values)
}

/// Reads pairs of lines: names, then values, both after a prefix.
fn parse_counters(text: &str, values: &mut BTreeMap<String, u64>) {
    let lines: Vec<&str> = text.lines().collect();
    for pair in lines.chunks_exact(2) {
        let (Some((prefix, names)), Some((_, numbers))) =
            (pair[0].split_once(": "), pair[1].split_once(": "))
        else {
            continue;
        };
        for (name, number) in names.split(' ').zip(numbers.split(' ')) {
            values.insert(format!("{prefix}.{name}"), number.parse().unwrap_or(0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counter_names_are_paired_with_values() {
        let mut values = BTreeMap::new();
        parse_counters(
            "Tcp: A OutRsts\nTcp: 1 7\nTcpExt: X TCPTimeouts\nTcpExt: -1 3\n",
            &mut values,
        );
        assert_eq!(values["Tcp.OutRsts"], 7);
        assert_eq!(values["TcpExt.TCPTimeouts"], 3);
    }
}
