//! Checks the raw file into a [`Config`]: resolves references, fills in defaults, refuses contradictions.

mod migration;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use holdfast_daemon::config::ConfigFile;
use holdfast_wire::{NodeId, Protocol};
use toml::Spanned;

use super::sections::{
    ChannelSection, GroupSection, NodeFile, NodeSection, PeerSection, PlacementSetting,
    ProtocolSetting, ReachKey, ServiceSection,
};
use super::{
    AppSocketConfig, ChannelConfig, Config, ConfigError, DEFAULT_PORT, GroupConfig, NodeConfig,
    PacketRouting, PeerConfig, PlacementRule, ServiceConfig,
};

const NAME_LENGTH_MAX: usize = 40;
const CAPACITY_DEFAULT: u32 = 131_072;
const CAPACITY_MAX: u32 = 16_777_216;
const WEIGHT_MAX: u32 = 1000;

/// Maximum length of a device name in Linux (`IFNAMSIZ` less the final zero).
const INTERFACE_LENGTH_MAX: usize = 15;

/// The file under check, for locating errors.
pub(super) struct ConfigChecker<'a> {
    file: ConfigFile<'a>,
}

/// Numbers of all nodes of the group by name, including this one.
type NodeIdsByName = BTreeMap<String, NodeId>;

impl<'a> ConfigChecker<'a> {
    pub(super) fn new(file: ConfigFile<'a>) -> Self {
        ConfigChecker { file }
    }

    pub(super) fn config(&self, raw: NodeFile) -> Result<Config, ConfigError> {
        let listed = self.peers(&raw.peer)?;
        let node = self.node(&raw.node, &listed)?;
        let peers: Vec<PeerConfig> = listed
            .into_iter()
            .filter(|peer| peer.name != node.name)
            .collect();
        let mut ids: NodeIdsByName = peers
            .iter()
            .map(|peer| (peer.name.clone(), peer.id))
            .collect();
        ids.insert(node.name.clone(), node.id);
        let group = self.group(&raw.group, &ids)?;
        let services = self.services(&raw.service, &ids, &node, &peers)?;
        Ok(Config {
            tls: raw.tls.resolve_paths(self.file.path()),
            channel: self.channel(&raw.channel)?,
            app: AppSocketConfig {
                group: raw.app.group,
                allowed_uids: raw.app.allowed_uids,
            },
            migration: self.migration(raw.migration)?,
            metrics_listen: raw.metrics.listen,
            log: raw.log.into_config(),
            node,
            group,
            peers,
            services,
        })
    }

    /// Checks the `[[peer]]` list, which may contain this node too. Numbers default to positions.
    fn peers(&self, raw: &[PeerSection]) -> Result<Vec<PeerConfig>, ConfigError> {
        let mut names = BTreeSet::new();
        let mut ids = BTreeSet::new();
        let mut addresses = BTreeSet::new();
        let mut peers = Vec::with_capacity(raw.len());
        for (position, peer) in raw.iter().enumerate() {
            let name = self.name(&peer.name)?;
            let id = match &peer.id {
                Some(id) => self.id(id)?,
                None => NodeId(u16::try_from(position + 1).unwrap_or(u16::MAX)),
            };
            let address = SocketAddr::new(self.host(&peer.address)?, self.port(&peer.port)?);
            if !names.insert(name.clone()) {
                let problem = format!("peer `{name}` appears twice");
                return Err(self.file.error_for(
                    &peer.name,
                    problem,
                    "give every node one [[peer]]",
                ));
            }
            if !ids.insert(id) {
                let problem = format!("peer `{name}` has id {}, as another peer has", id.0);
                let span = peer.id.as_ref().map_or(peer.name.span(), Spanned::span);
                return Err(self.file.error_at(
                    span,
                    problem,
                    "set `id` on every peer, or on none",
                ));
            }
            if !addresses.insert(address) {
                let problem = format!("peer `{name}` has address {address}, as another peer has");
                return Err(self.file.error_for(
                    &peer.address,
                    problem,
                    "give each peer its own address",
                ));
            }
            peers.push(PeerConfig { name, id, address });
        }
        Ok(peers)
    }

    fn node(&self, raw: &NodeSection, listed: &[PeerConfig]) -> Result<NodeConfig, ConfigError> {
        let name = self.name(&raw.name)?;
        let own_entry = listed.iter().find(|peer| peer.name == name);
        let id = self.own_id(raw, own_entry, listed)?;
        let address = match (&raw.address, own_entry) {
            (Some(address), _) => self.host(address)?,
            (None, Some(own)) => own.address.ip(),
            (None, None) => {
                let problem = "address is missing".to_owned();
                let advice = "set node.address, or list this node as a [[peer]] too";
                return Err(self.file.error_for(&raw.name, problem, advice));
            }
        };
        let port = match (&raw.port, own_entry) {
            (None, Some(own)) => own.address.port(),
            _ => self.port(&raw.port)?,
        };
        if let Some(own) = own_entry.filter(|own| own.address != SocketAddr::new(address, port)) {
            let problem = format!(
                "{} differs from this node's [[peer]] entry, {}",
                SocketAddr::new(address, port),
                own.address
            );
            let span = raw.address.as_ref().map(Spanned::span);
            let span = span.or(raw.port.as_ref().map(Spanned::span));
            let advice = "leave address and port out of [node], or make them equal";
            return Err(self
                .file
                .error_at(span.unwrap_or(raw.name.span()), problem, advice));
        }
        Ok(NodeConfig {
            interface: self.interface(&raw.interface)?,
            state_dir: path_or(&raw.state_dir, "/var/lib/holdfast"),
            run_dir: path_or(&raw.run_dir, "/run/holdfast"),
            bpffs: path_or(&raw.bpffs, "/sys/fs/bpf/holdfast"),
            cgroup: raw.cgroup.clone(),
            capacity: self.in_range(&raw.capacity, CAPACITY_DEFAULT, 1..=CAPACITY_MAX)?,
            realtime: raw.realtime.unwrap_or(true),
            name,
            id,
            address,
            port,
        })
    }

    fn own_id(
        &self,
        raw: &NodeSection,
        own_entry: Option<&PeerConfig>,
        listed: &[PeerConfig],
    ) -> Result<NodeId, ConfigError> {
        let Some(id) = &raw.id else {
            return own_entry.map(|own| own.id).ok_or_else(|| {
                let problem = "id is missing".to_owned();
                let advice = "set node.id, or list this node as a [[peer]] too";
                self.file.error_for(&raw.name, problem, advice)
            });
        };
        let number = self.id(id)?;
        match listed.iter().find(|peer| peer.id == number) {
            Some(taken) if taken.name != *raw.name.get_ref() => {
                let problem = format!("id {} belongs to peer `{}`", number.0, taken.name);
                Err(self.file.error_for(id, problem, "use another id"))
            }
            None if own_entry.is_some() => {
                let problem = format!("id {} differs from this node's [[peer]] entry", number.0);
                Err(self
                    .file
                    .error_for(id, problem, "leave id out of [node], or make them equal"))
            }
            _ => Ok(number),
        }
    }

    fn group(&self, raw: &GroupSection, ids: &NodeIdsByName) -> Result<GroupConfig, ConfigError> {
        let reach = match (*raw.reach.get_ref(), &raw.shared_mac) {
            (ReachKey::Steer, None) => PacketRouting::Steer,
            (ReachKey::Steer, Some(mac)) => {
                let problem = "reach `steer` does not use shared_mac".to_owned();
                return Err(self.file.error_for(
                    mac,
                    problem,
                    "remove the key, or set reach = \"broadcast\"",
                ));
            }
            (ReachKey::Broadcast, None) => {
                let problem = "reach `broadcast` needs shared_mac".to_owned();
                let advice = "add one, such as \"02:00:5e:00:00:01\", the same on every node";
                return Err(self.file.error_for(&raw.reach, problem, advice));
            }
            (ReachKey::Broadcast, Some(mac)) => PacketRouting::Broadcast {
                shared_mac: self.mac(mac)?,
            },
        };
        Ok(GroupConfig {
            name: self.name(&raw.name)?,
            reach,
            contact: self.resolve_node(raw.contact.get_ref(), raw.contact.span(), ids)?,
        })
    }

    fn services(
        &self,
        raw: &[ServiceSection],
        ids: &NodeIdsByName,
        node: &NodeConfig,
        peers: &[PeerConfig],
    ) -> Result<Vec<ServiceConfig>, ConfigError> {
        let mut taken_addresses = BTreeSet::new();
        let mut services = Vec::with_capacity(raw.len());
        for service in raw {
            let checked = self.service(service, ids)?;
            let ip = checked.address.ip();
            if ip == node.address || peers.iter().any(|peer| peer.address.ip() == ip) {
                let problem = format!("{ip} is a node's own address");
                let advice = "a service address belongs to the group; use one that no host has";
                return Err(self.file.error_for(&service.address, problem, advice));
            }
            let is_tcp = matches!(service.protocol, ProtocolSetting::Tcp);
            if !taken_addresses.insert((is_tcp, checked.address)) {
                let problem = format!("{} appears twice", checked.address);
                return Err(self
                    .file
                    .error_for(&service.port, problem, "keep one [[service]]"));
            }
            services.push(checked);
        }
        Ok(services)
    }

    fn service(
        &self,
        raw: &ServiceSection,
        ids: &NodeIdsByName,
    ) -> Result<ServiceConfig, ConfigError> {
        let mut weights: BTreeMap<NodeId, u32> = ids.values().map(|id| (*id, 1)).collect();
        for (name, weight) in &raw.weights {
            let id = self.resolve_node(name, weight.span(), ids)?;
            weights.insert(id, self.in_range(&Some(weight.clone()), 1, 0..=WEIGHT_MAX)?);
        }
        if weights.values().all(|weight| *weight == 0) {
            let problem = "every node's weight is 0".to_owned();
            return Err(self
                .file
                .error_for(&raw.name, problem, "give one node at least 1"));
        }
        let drain = raw.drain_ms.as_ref().map(|drain| {
            self.in_range(&Some(drain.clone()), 0, 0..=600_000)
                .map(Duration::from_millis)
        });
        Ok(ServiceConfig {
            pool: self.name(&raw.name)?,
            address: SocketAddr::new(
                self.host(&raw.address)?,
                self.port(&Some(raw.port.clone()))?,
            ),
            protocol: match raw.protocol {
                ProtocolSetting::Tcp => Protocol::Tcp,
                ProtocolSetting::Udp => Protocol::Udp,
            },
            placement: match raw.placement {
                PlacementSetting::Hash => PlacementRule::Hash,
                PlacementSetting::Port => PlacementRule::Port,
            },
            weights,
            drain: drain.transpose()?,
        })
    }

    fn channel(&self, raw: &ChannelSection) -> Result<ChannelConfig, ConfigError> {
        let ping_ms = self.in_range(&raw.ping_interval_ms, 250, 10..=60_000)?;
        let dead_ms = self.in_range(&raw.dead_after_ms, ping_ms.max(250) * 4, 20..=600_000)?;
        if dead_ms < 2 * ping_ms {
            let problem = format!("{dead_ms} ms is less than two ping intervals of {ping_ms} ms");
            let keys = [&raw.dead_after_ms, &raw.ping_interval_ms];
            let span = keys.iter().find_map(|key| key.as_ref()).map(Spanned::span);
            let advice = "raise dead_after_ms or lower ping_interval_ms";
            return Err(self
                .file
                .error_at(span.unwrap_or_default(), problem, advice));
        }
        // Two frames of maximum size must fit, or one could block the next forever.
        let queue_mib = self.in_range(&raw.queue_mib, 64, 32..=4096)?;
        Ok(ChannelConfig {
            ping_interval: Duration::from_millis(ping_ms),
            dead_after: Duration::from_millis(dead_ms),
            queue_bytes: queue_mib as usize * 1024 * 1024,
        })
    }

    /// Checks a name. A name must be one label of a domain name, because certificates contain it as one.
    fn name(&self, name: &Spanned<String>) -> Result<String, ConfigError> {
        let text = name.get_ref();
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let outside_allowed = text.starts_with('-') || text.ends_with('-');
        if text.is_empty()
            || text.len() > NAME_LENGTH_MAX
            || !text.chars().all(allowed)
            || outside_allowed
        {
            let problem = format!("`{text}` is not a name");
            let advice = "use 1 to 40 lower-case letters, digits and inner hyphens";
            return Err(self.file.error_for(name, problem, advice));
        }
        Ok(text.clone())
    }

    fn interface(&self, name: &Spanned<String>) -> Result<String, ConfigError> {
        let text = name.get_ref();
        let bad = |c: char| c.is_whitespace() || c == '/';
        if text.is_empty() || text.len() > INTERFACE_LENGTH_MAX || text.contains(bad) {
            let problem = format!("`{text}` is not a valid interface name");
            return Err(self
                .file
                .error_for(name, problem, "use a name that `ip link` shows"));
        }
        Ok(text.clone())
    }

    fn resolve_node(
        &self,
        name: &str,
        span: Range<usize>,
        ids: &NodeIdsByName,
    ) -> Result<NodeId, ConfigError> {
        ids.get(name).copied().ok_or_else(|| {
            let known_names: Vec<&str> = ids.keys().map(String::as_str).collect();
            let problem = format!("no node is called `{name}`");
            self.file.error_at(
                span,
                problem,
                &format!("use one of {}", known_names.join(", ")),
            )
        })
    }

    fn id(&self, id: &Spanned<u16>) -> Result<NodeId, ConfigError> {
        match id.get_ref() {
            0 => Err(self
                .file
                .error_for(id, "0 is not a valid id".to_owned(), "use 1 or more")),
            number => Ok(NodeId(*number)),
        }
    }

    fn port(&self, port: &Option<Spanned<u16>>) -> Result<u16, ConfigError> {
        self.in_range(port, DEFAULT_PORT, 1..=u16::MAX)
    }

    fn host(&self, address: &Spanned<IpAddr>) -> Result<IpAddr, ConfigError> {
        let ip = *address.get_ref();
        if ip.is_unspecified() || ip.is_multicast() {
            let problem = format!("{ip} is not a unicast address");
            return Err(self
                .file
                .error_for(address, problem, "use the address of one host"));
        }
        Ok(ip)
    }

    fn mac(&self, text: &Spanned<String>) -> Result<[u8; 6], ConfigError> {
        let bytes: Option<Vec<u8>> = text
            .get_ref()
            .split(':')
            .map(|pair| {
                u8::from_str_radix(pair, 16)
                    .ok()
                    .filter(|_| pair.len() == 2)
            })
            .collect();
        let mac: Option<[u8; 6]> = bytes.and_then(|bytes| bytes.try_into().ok());
        mac.filter(|mac| *mac != [0; 6] && *mac != [0xff; 6])
            .ok_or_else(|| {
                let problem = format!("`{}` is not a MAC address", text.get_ref());
                self.file
                    .error_for(text, problem, "write six pairs, such as 02:00:5e:00:00:01")
            })
    }

    fn in_range<T>(
        &self,
        value: &Option<Spanned<T>>,
        default: T,
        range: std::ops::RangeInclusive<T>,
    ) -> Result<T, ConfigError>
    where
        T: Copy + PartialOrd + std::fmt::Display,
    {
        let Some(value) = value else {
            return Ok(default);
        };
        if range.contains(value.get_ref()) {
            return Ok(*value.get_ref());
        }
        let problem = format!("{} is out of range", value.get_ref());
        let advice = format!("use {} to {}", range.start(), range.end());
        Err(self.file.error_for(value, problem, &advice))
    }
}

fn path_or(path: &Option<PathBuf>, default: &str) -> PathBuf {
    path.clone().unwrap_or_else(|| default.into())
}
