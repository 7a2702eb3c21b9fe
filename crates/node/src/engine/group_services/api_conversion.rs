//! Services in the types of the control API.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use holdfast_api::control::{
    CheckSettings, ErrorBody, FlowPlacementRule, ServerChecks, ServiceChange, ServiceEntry,
    ServiceList, ServiceSettings, ServiceSource,
};
use holdfast_wire::NodeId;
use holdfast_wire::group_data::{
    GroupChange, GroupService, ScriptNameError, ServiceChecks, ServiceName, ServicePatch,
    ServicePolicy, ServiceProtocol, SlotChoice, WeightChanges,
};
use holdfast_wire::membership_frames::NodeName;
use holdfast_wire::rserpool::PolicyKind;

use super::error_of_text;
use crate::config::{CheckConfig, PlacementRule, ServiceConfig, load_fraction};
use crate::engine::operator_view::error_body;
use crate::engine::{Engine, api_protocol};

impl Engine {
    /// Returns the services of the group: addresses that differ in nothing else are one service.
    pub(in crate::engine) fn service_list(&self) -> ServiceList {
        let (source, version) = match &self.group_services.settings {
            Some((version, _)) => (ServiceSource::Group, *version),
            None => (ServiceSource::File, 0),
        };
        let mut services: Vec<ServiceEntry> = Vec::new();
        for service in &self.config.services {
            let entry = self.service_entry(service);
            let is_same = |known: &&mut ServiceEntry| {
                let key = |entry: &ServiceEntry| (entry.name.clone(), entry.protocol, entry.port);
                key(known) == key(&entry)
            };
            match services.iter_mut().find(is_same) {
                None => services.push(entry),
                Some(known) => {
                    known.addresses.extend(&entry.addresses);
                    known.ending_addresses.extend(&entry.ending_addresses);
                    if known.shares.is_empty() {
                        known.shares = entry.shares;
                    }
                }
            }
        }
        services.sort_by(|a, b| (&a.name, a.port).cmp(&(&b.name, b.port)));
        ServiceList {
            source,
            version,
            services,
        }
    }

    fn service_entry(&self, service: &ServiceConfig) -> ServiceEntry {
        let named = |(id, number): (NodeId, u32)| (self.node_name(id), number);
        let address = vec![service.address.ip()];
        let (addresses, ending_addresses): (Vec<IpAddr>, Vec<IpAddr>) = match service.is_ending {
            true => (Vec::new(), address),
            false => (address, Vec::new()),
        };
        let weights = service.weights.iter().map(|(id, weight)| (*id, *weight));
        let ServicePolicy {
            kind,
            degradation,
            dpf,
        } = service.policy;
        ServiceEntry {
            name: service.pool.clone(),
            protocol: api_protocol(service.protocol),
            port: service.address.port(),
            addresses,
            ending_addresses,
            placement: match service.placement {
                PlacementRule::Hash => FlowPlacementRule::Hash,
                PlacementRule::Port => FlowPlacementRule::Port,
            },
            policy: kind.to_string(),
            load_degradation: load_of_fraction(degradation),
            load_dpf: load_of_fraction(dpf),
            weights: weights.map(named).collect(),
            shares: self.placement.shares(service.row).map(named).collect(),
            drain_ms: service.drain.map(milliseconds),
            checks: server_checks(&service.check),
        }
    }

    /// Converts a change from the API's form.
    pub(super) fn group_change_of(&self, change: &ServiceChange) -> Result<GroupChange, ErrorBody> {
        match change {
            ServiceChange::Add(new) => {
                let name = service_name(&new.name)?;
                let protocol = match new.protocol {
                    holdfast_api::Protocol::Tcp => ServiceProtocol::Tcp,
                    holdfast_api::Protocol::Udp => ServiceProtocol::Udp,
                };
                let mut service =
                    GroupService::new(name, protocol, new.port, new.addresses.clone());
                let settings = &new.settings;
                service.policy = policy(settings, service.policy)?;
                service.placement = placement(settings).unwrap_or_default();
                let weights = weights(&settings.weights)?.into_iter();
                let weights = weights.filter_map(|(node, weight)| Some((node, weight?)));
                service.weights = weights.collect();
                service.drain_ms = settings.drain_ms.filter(|drain_ms| *drain_ms > 0);
                service.checks = checks(&settings.checks, service.checks)?;
                Ok(GroupChange::AddService(Box::new(service)))
            }
            ServiceChange::Set(update) => {
                let name = service_name(&update.name)?;
                let settings = &update.settings;
                let changes_policy = settings.policy.is_some()
                    || settings.load_degradation.is_some()
                    || settings.load_dpf.is_some();
                let known = self.known_service(&name);
                let known_policy = known.map(|service| service.policy).unwrap_or_default();
                let known_checks = known.map(|service| service.checks.clone());
                let patch = ServicePatch {
                    added_addresses: update.added_addresses.clone(),
                    removed_addresses: update.removed_addresses.clone(),
                    placement: placement(settings),
                    policy: match changes_policy {
                        true => Some(policy(settings, known_policy)?),
                        false => None,
                    },
                    weights: weights(&settings.weights)?,
                    drain_ms: (settings.drain_ms)
                        .map(|drain_ms| Some(drain_ms).filter(|drain_ms| *drain_ms > 0)),
                    checks: match settings.checks == CheckSettings::default() {
                        true => None,
                        false => Some(checks(&settings.checks, known_checks.unwrap_or_default())?),
                    },
                };
                Ok(GroupChange::SetService {
                    name,
                    patch: Box::new(patch),
                })
            }
            ServiceChange::Remove(name) => Ok(GroupChange::RemoveService(service_name(name)?)),
        }
    }

    fn known_service(&self, name: &ServiceName) -> Option<&GroupService> {
        let settings = self.group_services.settings.as_ref();
        settings.and_then(|(_, settings)| settings.service(name))
    }
}

fn service_name(text: &str) -> Result<ServiceName, ErrorBody> {
    text.parse::<ServiceName>()
        .map_err(|error| error_of_text(&error.to_string()))
}

fn policy(settings: &ServiceSettings, known: ServicePolicy) -> Result<ServicePolicy, ErrorBody> {
    let kind = match &settings.policy {
        None => known.kind,
        Some(name) => name
            .parse::<PolicyKind>()
            .map_err(|error| error_of_text(&error.to_string()))?,
    };
    let fraction = |load: Option<f64>, known: u32| match load {
        None => Ok(known),
        Some(load) if (0.0..=1.0).contains(&load) => Ok(load_fraction(load)),
        Some(load) => Err(error_body(format!("{load} is not a load"), "use 0 to 1")),
    };
    Ok(ServicePolicy {
        kind,
        degradation: fraction(settings.load_degradation, known.degradation)?,
        dpf: fraction(settings.load_dpf, known.dpf)?,
    })
}

fn checks(settings: &CheckSettings, known: ServiceChecks) -> Result<ServiceChecks, ErrorBody> {
    let script = match settings.script.as_deref() {
        None => known.script,
        Some("") => None,
        Some(name) => Some(
            name.parse()
                .map_err(|error: ScriptNameError| error_of_text(&error.to_string()))?,
        ),
    };
    Ok(ServiceChecks {
        connect: settings.connect.unwrap_or(known.connect),
        script,
        interval_ms: settings.interval_ms.unwrap_or(known.interval_ms),
        timeout_ms: settings.timeout_ms.unwrap_or(known.timeout_ms),
        fall: settings.fall.unwrap_or(known.fall),
        rise: settings.rise.unwrap_or(known.rise),
        stall_ms: settings.stall_ms.unwrap_or(known.stall_ms),
    })
}

fn server_checks(check: &CheckConfig) -> ServerChecks {
    let script = check.script.as_ref();
    ServerChecks {
        connect: check.connect,
        script: script.map(|script| script.path.display().to_string()),
        interval_ms: milliseconds(check.interval),
        timeout_ms: milliseconds(check.timeout),
        fall: check.fall,
        rise: check.rise,
        stall_ms: check.stall_after.map_or(0, milliseconds),
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn placement(settings: &ServiceSettings) -> Option<SlotChoice> {
    settings.placement.map(|placement| match placement {
        FlowPlacementRule::Hash => SlotChoice::Hash,
        FlowPlacementRule::Port => SlotChoice::Port,
    })
}

fn weights(weights: &BTreeMap<String, Option<u32>>) -> Result<WeightChanges, ErrorBody> {
    let weight_of = |(name, weight): (&String, &Option<u32>)| {
        let name = name.parse::<NodeName>();
        name.map(|name| (name, *weight))
    };
    let weights = weights.iter().map(weight_of);
    weights
        .collect::<Result<WeightChanges, _>>()
        .map_err(|error| error_of_text(&error.to_string()))
}

/// Converts a fraction of `u32::MAX` to a load of 0 to 1.
fn load_of_fraction(fraction: u32) -> f64 {
    f64::from(fraction) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_checks_stay() {
        let known = ServiceChecks {
            connect: true,
            script: Some("check-web".parse().unwrap()),
            fall: 5,
            ..ServiceChecks::default()
        };
        let unchanged = checks(&CheckSettings::default(), known.clone()).unwrap();
        assert_eq!(unchanged, known);
        let settings = CheckSettings {
            script: Some(String::new()),
            rise: Some(7),
            ..CheckSettings::default()
        };
        let expected = ServiceChecks {
            script: None,
            rise: 7,
            ..known.clone()
        };
        assert_eq!(checks(&settings, known.clone()).unwrap(), expected);
        let settings = CheckSettings {
            script: Some("/bin/true".to_owned()),
            ..CheckSettings::default()
        };
        let refusal = checks(&settings, known).unwrap_err();
        assert!(refusal.error.contains("not the name of a check script"));
    }

    #[test]
    fn default_checks_are_the_same_in_all_forms() {
        let of_group = checks(&CheckSettings::default(), ServiceChecks::default()).unwrap();
        assert_eq!(of_group, ServiceChecks::default());
        assert_eq!(
            server_checks(&CheckConfig::default()),
            ServerChecks::default()
        );
    }
}
