//! Configuration file of a node.

use anyhow::Result;
use holdfast_lab::{SHARED_MAC, ServiceReach};
use toml::{Table, Value};

use super::{Cluster, ClusterService, IpFamily};

/// Name of the group.
pub const GROUP_NAME: &str = "lab";

/// Returns the configuration of one node, in the format of `docs/configuration.md`.
pub fn node_config(cluster: &Cluster, node: &str) -> Result<String> {
    let spec = cluster.spec();
    let directory = cluster.directory();
    let mut group = toml_table([("name", GROUP_NAME.into())]);
    match spec.reach {
        ServiceReach::Steer => group.insert("reach".into(), "steer".into()),
        ServiceReach::Broadcast => {
            group.insert("shared_mac".into(), SHARED_MAC.to_string().into());
            group.insert("reach".into(), "broadcast".into())
        }
    };
    let tls = directory.join("ca");
    let file = |name: String| Value::from(tls.join(name).display().to_string());
    let state = cluster.state_dir(node).display().to_string();
    let checks = cluster.checks_dir(node).display().to_string();
    let mut node_section = toml_table([
        ("name", node.into()),
        ("interface", "eth0".into()),
        ("state_dir", state.into()),
        ("checks_dir", checks.into()),
    ]);
    if cluster.is_self_running() {
        let own = cluster.address(node, spec.underlay)?.to_string();
        node_section.insert("address".into(), own.into());
        let voters = cluster.voters();
        let role = match voters.iter().any(|voter| voter == node) {
            true => "backup",
            false => "server",
        };
        group.insert("role".into(), role.into());
        let others = voters.iter().filter(|voter| *voter != node);
        let seeds = others.map(|seed| cluster.address(seed, spec.underlay));
        let seeds = seeds.map(|seed| Ok(seed?.to_string().into()));
        group.insert(
            "seeds".into(),
            seeds.collect::<Result<Vec<Value>>>()?.into(),
        );
        if spec.etcd_members > 0 {
            group.insert("store".into(), "etcd".into());
        }
    } else {
        group.insert("contact".into(), "n1".into());
    }
    let mut config = toml_table([
        ("node", node_section.into()),
        ("group", group.into()),
        (
            "tls",
            toml_table([
                ("ca", file("ca.pem".into())),
                ("crl", file("ca.crl".into())),
                ("cert", file(format!("{node}.pem"))),
                ("key", file(format!("{node}.key"))),
            ])
            .into(),
        ),
        (
            "log",
            toml_table([("filter", spec.log.as_str().into())]).into(),
        ),
    ]);
    if !cluster.is_self_running() {
        config.extend(configured_group(cluster)?);
    } else if spec.etcd_members > 0 {
        let members = cluster.etcd_hosts().into_iter();
        let urls = members.map(|member| Ok(cluster.etcd_url(&member)?.into()));
        let urls = urls.collect::<Result<Vec<Value>>>()?;
        config.insert(
            "etcd".into(),
            toml_table([("endpoints", urls.into())]).into(),
        );
    }
    if spec.migration {
        let users = Value::Array(vec![0.into()]);
        let paths = Value::Array(vec!["/".into()]);
        let mut migration =
            toml_table([("enabled", true.into()), ("users", users), ("paths", paths)]);
        migration.extend(spec.migration_policy.clone());
        config.insert("migration".into(), migration.into());
    }
    Ok(toml::to_string(&config)?)
}

/// Returns the sections that describe the whole group, for a group that does not run itself.
fn configured_group(cluster: &Cluster) -> Result<Table> {
    let spec = cluster.spec();
    let mut peers = Vec::new();
    for peer in cluster.nodes() {
        let address = cluster.address(&peer, spec.underlay)?.to_string();
        peers.push(toml_table([("name", peer.into()), ("address", address.into())]).into());
    }
    let families = [IpFamily::V4, IpFamily::V6].into_iter();
    let services = families.flat_map(|family| spec.services.iter().map(move |each| (family, each)));
    let services = services.map(|(family, each)| service_table(cluster, family, each).into());
    Ok(toml_table([
        ("peer", Value::Array(peers)),
        ("service", Value::Array(services.collect())),
    ]))
}

fn service_table(cluster: &Cluster, family: IpFamily, service: &ClusterService) -> Table {
    let mut entry = toml_table([
        ("name", service.pool.as_str().into()),
        (
            "address",
            cluster.service_address(family).to_string().into(),
        ),
        ("port", i64::from(service.port).into()),
        ("protocol", service.protocol.to_string().into()),
    ]);
    let weights = service.weights.iter();
    let weights: Table = weights
        .map(|(node, weight)| (node.clone(), i64::from(*weight).into()))
        .collect();
    if !weights.is_empty() {
        entry.insert("weights".into(), weights.into());
    }
    if let Some(drain_ms) = service.drain_ms {
        entry.insert(
            "drain_ms".into(),
            i64::try_from(drain_ms).unwrap_or(i64::MAX).into(),
        );
    }
    entry
}

fn toml_table<const N: usize>(entries: [(&str, Value); N]) -> Table {
    entries
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect()
}
