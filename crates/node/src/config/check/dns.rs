//! Checks `[dns]`.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use holdfast_dns::{
    ConfiguredAddress, ConfiguredName, DnsNameError, DnsZoneName, Label, NameOwner, NameServer,
    SelectionRule, TransportProtocol, ZoneSettings,
};
use holdfast_wire::group_data::WEIGHT_MAX;
use toml::Spanned;

use super::super::sections::{
    DnsAddressConfigSection, DnsConfigSection, DnsNameConfigSection, DnsPolicySetting,
    DnsProtocolSetting,
};
use super::super::{ConfigError, DnsConfig, NodeConfig};
use super::ConfigChecker;

/// Port of DNS.
const DNS_PORT: u16 = 53;
const TTL_S_DEFAULT: u32 = 5;
const TTL_S_MAX: u32 = 86_400;
const RESPONSES_PER_S_DEFAULT: u32 = 200;
const RESPONSES_PER_S_MAX: u32 = 1_000_000;
const LISTEN_MAX: usize = 16;
const NAME_SERVERS_MAX: usize = 16;
const NAMES_MAX: usize = 64;
/// Maximum number of addresses of a name, and of records in an answer.
const ADDRESSES_MAX: usize = 64;
/// Name of the zone itself in the list of names.
const APEX: &str = "@";

impl ConfigChecker<'_> {
    pub(super) fn dns(
        &self,
        raw: &DnsConfigSection,
        node: &NodeConfig,
    ) -> Result<DnsConfig, ConfigError> {
        let origin = raw.zone.get_ref().parse::<DnsZoneName>();
        let origin = origin.map_err(|error| self.dns_name_error(&raw.zone, &error))?;
        let listen = self.dns_listen(raw, node)?;
        let name_servers = self.dns_name_servers(raw, node, &listen)?;
        self.at_most(&raw.zone, raw.name.len(), NAMES_MAX, "names")?;
        let mut owners = BTreeSet::new();
        let mut names = Vec::with_capacity(raw.name.len());
        for name in &raw.name {
            let checked = self.dns_name(name)?;
            if !owners.insert(checked.owner.clone()) {
                let problem = format!("name `{}` appears twice", name.name.get_ref());
                let advice = "give each name one [[dns.name]] with all addresses";
                return Err(self.file.error_for(&name.name, problem, advice));
            }
            names.push(checked);
        }
        let ttl_s = self.in_range(&raw.ttl_s, TTL_S_DEFAULT, 0..=TTL_S_MAX)?;
        Ok(DnsConfig {
            listen,
            zone: ZoneSettings {
                origin,
                ttl_s,
                name_servers,
            },
            responses_per_s: self.in_range(
                &raw.responses_per_s,
                RESPONSES_PER_S_DEFAULT,
                1..=RESPONSES_PER_S_MAX,
            )?,
            names,
        })
    }

    fn dns_listen(
        &self,
        raw: &DnsConfigSection,
        node: &NodeConfig,
    ) -> Result<Vec<SocketAddr>, ConfigError> {
        if raw.listen.is_empty() {
            return Ok(vec![SocketAddr::new(node.address, DNS_PORT)]);
        }
        self.at_most(
            &raw.zone,
            raw.listen.len(),
            LISTEN_MAX,
            "addresses in `listen`",
        )?;
        let mut listen = Vec::with_capacity(raw.listen.len());
        for address in &raw.listen {
            let at = *address.get_ref();
            if at.ip().is_unspecified() || at.ip().is_multicast() || at.port() == 0 {
                let problem = format!("{at} is not the address of one socket");
                let advice = "name each address of this host, with a port: an answer must come from the address that was asked";
                return Err(self.file.error_for(address, problem, advice));
            }
            if listen.contains(&at) {
                let problem = format!("{at} appears twice");
                return Err(self
                    .file
                    .error_for(address, problem, "name each address once"));
            }
            listen.push(at);
        }
        Ok(listen)
    }

    fn dns_name_servers(
        &self,
        raw: &DnsConfigSection,
        node: &NodeConfig,
        listen: &[SocketAddr],
    ) -> Result<Vec<NameServer>, ConfigError> {
        if raw.name_servers.is_empty() {
            let label = node.name.parse::<Label>();
            let own_server = |label| NameServer {
                label,
                addresses: listen.iter().map(SocketAddr::ip).collect(),
            };
            let own_server = label.map(own_server);
            return match own_server {
                Ok(server) => Ok(vec![server]),
                Err(error) => Err(self.dns_name_error(&raw.zone, &error)),
            };
        }
        let count = raw.name_servers.len();
        self.at_most(&raw.zone, count, NAME_SERVERS_MAX, "name servers")?;
        let mut servers = Vec::with_capacity(count);
        for (name, addresses) in &raw.name_servers {
            let label = name.get_ref().parse::<Label>();
            let label = label.map_err(|error| self.dns_name_error(name, &error))?;
            self.at_most(name, addresses.len(), ADDRESSES_MAX, "addresses")?;
            if addresses.is_empty() {
                let problem = "the name server has no address".to_owned();
                let advice = "write the addresses at which the server's node answers queries";
                return Err(self.file.error_for(name, problem, advice));
            }
            let addresses = addresses.iter().map(|address| self.host(address));
            servers.push(NameServer {
                label,
                addresses: addresses.collect::<Result<_, _>>()?,
            });
        }
        Ok(servers)
    }

    fn dns_name(&self, raw: &DnsNameConfigSection) -> Result<ConfiguredName, ConfigError> {
        let label = |text: &Spanned<String>| {
            let label = text.get_ref().parse::<Label>();
            label.map_err(|error| self.dns_name_error(text, &error))
        };
        let owner = match raw.name.get_ref().as_str() {
            APEX => NameOwner::Apex,
            _ => NameOwner::Below(label(&raw.name)?),
        };
        let service = match (&raw.service, &owner) {
            (Some(service), _) => label(service)?,
            (None, NameOwner::Below(label)) => label.clone(),
            (None, NameOwner::Apex) => {
                let problem = "the zone's own name does not say what is offered there".to_owned();
                let advice = "set `service`, such as \"http\"";
                return Err(self.file.error_for(&raw.name, problem, advice));
            }
        };
        let addresses = self.dns_addresses(raw)?;
        let has_one_weight = addresses
            .iter()
            .all(|each| each.weight == addresses[0].weight);
        let rule = match raw.policy {
            Some(DnsPolicySetting::RoundRobin) => SelectionRule::Rotate,
            Some(DnsPolicySetting::WeightedRandom) => SelectionRule::Weighted,
            None if has_one_weight => SelectionRule::Rotate,
            None => SelectionRule::Weighted,
        };
        let answers_default = match rule {
            SelectionRule::Rotate => ADDRESSES_MAX,
            // Resolvers and clients change the order, so that weights count only if the answer has one address.
            SelectionRule::Weighted => 1,
        };
        Ok(ConfiguredName {
            owner,
            service,
            protocol: match raw.protocol {
                DnsProtocolSetting::Tcp => TransportProtocol::Tcp,
                DnsProtocolSetting::Udp => TransportProtocol::Udp,
            },
            port: self.in_range(&Some(raw.port.clone()), 0, 1..=u16::MAX)?,
            rule,
            answers_max: self.in_range(&raw.answers, answers_default, 1..=ADDRESSES_MAX)?,
            addresses,
        })
    }

    fn dns_addresses(
        &self,
        raw: &DnsNameConfigSection,
    ) -> Result<Vec<ConfiguredAddress>, ConfigError> {
        self.at_most(&raw.name, raw.addresses.len(), ADDRESSES_MAX, "addresses")?;
        let mut addresses: Vec<ConfiguredAddress> = Vec::with_capacity(raw.addresses.len());
        for DnsAddressConfigSection { address, weight } in &raw.addresses {
            let checked = ConfiguredAddress {
                address: self.host(address)?,
                weight: self.in_range(weight, 1, 0..=WEIGHT_MAX)?,
            };
            if addresses
                .iter()
                .any(|known| known.address == checked.address)
            {
                let problem = format!("{} appears twice", checked.address);
                let advice = "name each address once, with its weight";
                return Err(self.file.error_for(address, problem, advice));
            }
            addresses.push(checked);
        }
        if addresses.iter().all(|address| address.weight == 0) {
            let problem = "no address has a weight above 0".to_owned();
            let advice = "give the name an address with a weight of at least 1";
            return Err(self.file.error_for(&raw.name, problem, advice));
        }
        Ok(addresses)
    }

    fn at_most(
        &self,
        at: &Spanned<String>,
        count: usize,
        max: usize,
        things: &str,
    ) -> Result<(), ConfigError> {
        if count <= max {
            return Ok(());
        }
        let problem = format!("there are {count} {things}");
        Err(self
            .file
            .error_for(at, problem, &format!("list at most {max}")))
    }

    fn dns_name_error(&self, at: &Spanned<String>, error: &DnsNameError) -> ConfigError {
        let advice = "use labels of letters, digits and inner hyphens, such as \"example.test\"";
        self.file.error_for(at, error.to_string(), advice)
    }
}
