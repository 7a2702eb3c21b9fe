//! Checks the raw file into a [`Config`]: resolves references, fills in defaults, refuses contradictions.

mod balance;
mod dns;
mod etcd;
mod migration;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_api::ca::{NODE_DAYS, RENEWED_DAYS};
use holdfast_api::enrolment::DEFAULT_ENROLMENT_PORT;
use holdfast_daemon::config::ConfigFile;
use holdfast_proto::node_pool::depends_on_loads;
use holdfast_wire::group_data::{ServicePolicy, WEIGHT_MAX};
use holdfast_wire::membership_frames::JoinRole;
use holdfast_wire::rserpool::PolicyKind;
use holdfast_wire::{NodeId, Protocol};
use toml::Spanned;

use super::sections::{
    ChannelConfigSection, GroupConfigSection, JoiningConfigSection, NodeConfigSection, NodeFile,
    PeerConfigSection, PlacementSetting, ProtocolSetting, ReachKey, RoleKey, ServiceConfigSection,
};
use super::{
    AppSocketConfig, ChannelConfig, CheckConfig, CheckScript, Config, ConfigError, DEFAULT_PORT,
    GroupConfig, JoiningConfig, NodeConfig, PacketRouting, PeerConfig, PlacementRule,
    SelfRunningGroupConfig, ServiceConfig,
};

const NAME_LENGTH_MAX: usize = 40;
const CAPACITY_DEFAULT: u32 = 131_072;
const CAPACITY_MAX: u32 = 16_777_216;
const SEEDS_MAX: usize = 16;

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
        let is_self_running = raw.group.contact.is_none();
        if is_self_running {
            self.check_self_running(&raw)?;
        }
        let listed = self.peers(&raw.peer)?;
        let node = self.node(&raw.node, &listed, is_self_running)?;
        let peers: Vec<PeerConfig> = listed
            .into_iter()
            .filter(|peer| peer.name != node.name)
            .collect();
        let mut ids: NodeIdsByName = peers
            .iter()
            .map(|peer| (peer.name.clone(), peer.id))
            .collect();
        ids.insert(node.name.clone(), node.id);
        let mut group = self.group(&raw.group, &ids, node.port)?;
        let store = self.view_store(&raw)?;
        if let Some(self_running) = &mut group.self_running {
            self_running.store = store;
        }
        let services = self.services(&raw.service, &ids, &node, &peers)?;
        self.check_policies(&raw.service, &services, &group)?;
        Ok(Config {
            tls: raw.tls.resolve_paths(self.file.path()),
            joining: raw
                .joining
                .map(|joining| self.joining(joining, node.port))
                .transpose()?,
            channel: self.channel(&raw.channel)?,
            app: AppSocketConfig {
                group: raw.app.group,
                allowed_uids: raw.app.allowed_uids,
            },
            migration: self.migration(raw.migration)?,
            balance: self.balance(raw.balance)?,
            dns: (raw.dns.as_ref())
                .map(|dns| self.dns(dns, &node))
                .transpose()?,
            metrics_listen: raw.metrics.listen,
            log: raw.log.into_config(),
            node,
            group,
            peers,
            services,
        })
    }

    /// Refuses keys that contradict a group that runs itself.
    fn check_self_running(&self, raw: &NodeFile) -> Result<(), ConfigError> {
        let advice =
            "remove the key, or name the contact node of a configured group in group.contact";
        if let Some(id) = &raw.node.id {
            let problem = "a group that runs itself gives each node its number".to_owned();
            return Err(self.file.error_for(id, problem, advice));
        }
        if let Some(peer) = raw.peer.first() {
            let problem = "a group that runs itself finds its nodes itself".to_owned();
            return Err(self.file.error_for(&peer.name, problem, advice));
        }
        if let Some(service) = raw.service.first() {
            let problem = "the services of a group that runs itself are the group's".to_owned();
            let advice = "remove [[service]], and use `holdfast service add`";
            return Err(self.file.error_for(&service.name, problem, advice));
        }
        Ok(())
    }

    /// Checks the `[[peer]]` list, which may contain this node too. Numbers default to positions.
    fn peers(&self, raw: &[PeerConfigSection]) -> Result<Vec<PeerConfig>, ConfigError> {
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

    fn node(
        &self,
        raw: &NodeConfigSection,
        listed: &[PeerConfig],
        is_self_running: bool,
    ) -> Result<NodeConfig, ConfigError> {
        let name = self.name(&raw.name)?;
        let own_entry = listed.iter().find(|peer| peer.name == name);
        let id = match is_self_running {
            true => NodeId(0),
            false => self.own_id(raw, own_entry, listed)?,
        };
        let address = match (&raw.address, own_entry) {
            (Some(address), _) => self.host(address)?,
            (None, Some(own)) => own.address.ip(),
            (None, None) => {
                let problem = "address is missing".to_owned();
                let advice = match is_self_running {
                    true => "set node.address",
                    false => "set node.address, or list this node as a [[peer]] too",
                };
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
            checks_dir: path_or(&raw.checks_dir, "/etc/holdfast/checks"),
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
        raw: &NodeConfigSection,
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

    fn group(
        &self,
        raw: &GroupConfigSection,
        ids: &NodeIdsByName,
        port: u16,
    ) -> Result<GroupConfig, ConfigError> {
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
        let (contact, self_running) = match &raw.contact {
            Some(contact) => {
                self.check_configured(raw)?;
                let contact = self.resolve_node(contact.get_ref(), contact.span(), ids)?;
                (contact, None)
            }
            None => (NodeId(0), Some(self.self_running(raw, port)?)),
        };
        Ok(GroupConfig {
            name: self.name(&raw.name)?,
            reach,
            contact,
            self_running,
            on_contact: self.program(raw.on_contact.as_ref())?,
        })
    }

    /// Refuses keys that contradict a configured group.
    fn check_configured(&self, raw: &GroupConfigSection) -> Result<(), ConfigError> {
        let spans = [
            raw.role.as_ref().map(Spanned::span),
            raw.seeds.first().map(Spanned::span),
            raw.store.as_ref().map(Spanned::span),
        ];
        match spans.into_iter().flatten().next() {
            Some(span) => {
                let problem =
                    "a group with a configured contact node does not run itself".to_owned();
                let advice = "remove the key, or remove group.contact, and the group runs itself";
                Err(self.file.error_at(span, problem, advice))
            }
            None => Ok(()),
        }
    }

    fn self_running(
        &self,
        raw: &GroupConfigSection,
        port: u16,
    ) -> Result<SelfRunningGroupConfig, ConfigError> {
        let role = match raw.role.as_ref().map(Spanned::get_ref) {
            None | Some(RoleKey::Backup) => JoinRole::Backup,
            Some(RoleKey::Server) => JoinRole::ServerNode,
        };
        if raw.seeds.len() > SEEDS_MAX {
            let problem = format!("there are {} seeds", raw.seeds.len());
            let advice = format!("name at most {SEEDS_MAX}");
            return Err(self.file.error_for(&raw.seeds[0], problem, &advice));
        }
        let seeds = raw.seeds.iter().map(|seed| self.seed(seed, port));
        Ok(SelfRunningGroupConfig {
            role,
            seeds: seeds.collect::<Result<_, _>>()?,
            store: None,
        })
    }

    /// Reads the address of a daemon, by default with the port of this node's.
    fn seed(&self, text: &Spanned<String>, port: u16) -> Result<SocketAddr, ConfigError> {
        let address = text.get_ref().parse::<SocketAddr>();
        let address = address.or_else(|_| {
            let ip = text.get_ref().parse::<IpAddr>();
            ip.map(|ip| SocketAddr::new(ip, port))
        });
        let is_usable = |address: &SocketAddr| {
            !address.ip().is_unspecified() && !address.ip().is_multicast() && address.port() != 0
        };
        address.ok().filter(is_usable).ok_or_else(|| {
            let problem = format!("`{}` is not the address of a daemon", text.get_ref());
            let advice = "write an address, with or without a port: \"10.0.0.1\", \"10.0.0.1:7400\", \"[fd00::1]:7400\"";
            self.file.error_for(text, problem, advice)
        })
    }

    /// Checks the path of a program that the daemon runs.
    fn program(&self, raw: Option<&Spanned<PathBuf>>) -> Result<Option<PathBuf>, ConfigError> {
        match raw {
            Some(path) if !path.get_ref().is_absolute() => {
                let problem = "the path of a program must be absolute".to_owned();
                let advice = "begin it with /, without arguments";
                Err(self.file.error_for(path, problem, advice))
            }
            path => Ok(path.map(|path| path.get_ref().clone())),
        }
    }

    fn services(
        &self,
        raw: &[ServiceConfigSection],
        ids: &NodeIdsByName,
        node: &NodeConfig,
        peers: &[PeerConfig],
    ) -> Result<Vec<ServiceConfig>, ConfigError> {
        let mut taken_addresses = BTreeSet::new();
        let mut services = Vec::with_capacity(raw.len());
        for (row, service) in (0u16..).zip(raw) {
            let checked = self.service(service, row, ids)?;
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
        raw: &ServiceConfigSection,
        row: u16,
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
            check: self.server_check(raw)?,
            policy: self.policy(raw)?,
            row,
            is_ending: false,
            replication: None,
        })
    }

    fn server_check(&self, service: &ServiceConfigSection) -> Result<CheckConfig, ConfigError> {
        let (raw, default) = (&service.check, CheckConfig::default());
        let is_udp = matches!(service.protocol, ProtocolSetting::Udp);
        if let Some(connect) = raw
            .connect
            .as_ref()
            .filter(|connect| *connect.get_ref() && is_udp)
        {
            let problem = "a udp service has no connections to check".to_owned();
            let advice = "leave check.connect out, or use check.script";
            return Err(self.file.error_for(connect, problem, advice));
        }
        if let Some(script) = (raw.script.as_ref()).filter(|script| !script.get_ref().is_absolute())
        {
            let problem = format!("{} is not an absolute path", script.get_ref().display());
            let advice = "write the whole path of the check script, from the root directory";
            return Err(self.file.error_for(script, problem, advice));
        }
        let stall_ms = self.in_range(&raw.stall_ms, 500, 0..=600_000)?;
        Ok(CheckConfig {
            connect: raw
                .connect
                .as_ref()
                .is_some_and(|connect| *connect.get_ref()),
            script: raw.script.as_ref().map(|script| CheckScript {
                path: script.get_ref().clone(),
                is_named_by_group: false,
            }),
            interval: self.millis(&raw.interval_ms, default.interval, 10..=600_000)?,
            timeout: self.millis(&raw.timeout_ms, default.timeout, 1..=600_000)?,
            fall: self.in_range(&raw.fall, default.fall, 1..=100)?,
            rise: self.in_range(&raw.rise, default.rise, 1..=100)?,
            stall_after: (stall_ms > 0).then(|| Duration::from_millis(stall_ms)),
        })
    }

    fn millis(
        &self,
        value: &Option<Spanned<u64>>,
        default: Duration,
        range: std::ops::RangeInclusive<u64>,
    ) -> Result<Duration, ConfigError> {
        let default_ms = u64::try_from(default.as_millis()).unwrap_or(u64::MAX);
        self.in_range(value, default_ms, range)
            .map(Duration::from_millis)
    }

    fn policy(&self, raw: &ServiceConfigSection) -> Result<ServicePolicy, ConfigError> {
        let mut policy = ServicePolicy::default();
        if let Some(name) = &raw.policy {
            policy.kind = name.get_ref().parse::<PolicyKind>().map_err(|error| {
                self.file
                    .error_for(name, error.to_string(), "leave the key out for WRAND")
            })?;
        }
        policy.degradation = load_fraction(self.in_range(&raw.load_degradation, 0.0, 0.0..=1.0)?);
        policy.dpf = load_fraction(self.in_range(&raw.load_dpf, 0.0, 0.0..=1.0)?);
        Ok(policy)
    }

    /// Checks that the nodes can carry out the policies: with broadcast each node decides alone, so all must know the
    /// same figures.
    fn check_policies(
        &self,
        raw: &[ServiceConfigSection],
        services: &[ServiceConfig],
        group: &GroupConfig,
    ) -> Result<(), ConfigError> {
        let is_broadcast = matches!(group.reach, PacketRouting::Broadcast { .. });
        for (raw, service) in raw.iter().zip(services) {
            if let Some(name) = &raw.policy
                && is_broadcast
                && depends_on_loads(service.policy.kind)
            {
                let problem = format!("policy {} needs reach `steer`", service.policy.kind);
                let advice = "with broadcast use RR, WRR, RAND, WRAND or PRIO";
                return Err(self.file.error_for(name, problem, advice));
            }
        }
        Ok(())
    }

    fn channel(&self, raw: &ChannelConfigSection) -> Result<ChannelConfig, ConfigError> {
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
            silent_after: self.millis(
                &raw.silent_after_ms,
                Duration::from_millis(200),
                50..=60_000,
            )?,
            queue_bytes: queue_mib as usize * 1024 * 1024,
        })
    }

    fn joining(
        &self,
        raw: JoiningConfigSection,
        node_port: u16,
    ) -> Result<JoiningConfig, ConfigError> {
        let port = self.in_range(&raw.port, DEFAULT_ENROLMENT_PORT, 1..=u16::MAX)?;
        if let Some(written) = raw.port.as_ref().filter(|_| port == node_port) {
            let problem = format!("{port} is the port of the channel between nodes");
            return Err(self.file.error_for(written, problem, "use another port"));
        }
        let base = self.file.path().parent().unwrap_or(Path::new(""));
        Ok(JoiningConfig {
            authority: raw.authority.map(|dir| base.join(dir)),
            port,
            days: self.in_range(&raw.days, RENEWED_DAYS, 1..=NODE_DAYS)?,
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

/// Converts a load of 0 to 1 to a fraction of `u32::MAX`.
pub(crate) fn load_fraction(load: f64) -> u32 {
    (load.clamp(0.0, 1.0) * f64::from(u32::MAX)).round() as u32
}

fn path_or(path: &Option<PathBuf>, default: &str) -> PathBuf {
    path.clone().unwrap_or_else(|| default.into())
}
