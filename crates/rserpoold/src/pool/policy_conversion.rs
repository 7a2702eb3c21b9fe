//! Conversion of a policy's name and parameters.

use holdfast_api::control::PolicyDetail;
use holdfast_wire::rserpool::{Policy, PolicyKind};

use crate::api_conversion;

/// Returns the policy that a program requests. Missing parameters are 0, a missing weight is 1.
///
/// # Errors
/// Unknown policy, a share outside its range, or a parameter that the policy does not have; as text.
pub(super) fn policy_from_detail(detail: &PolicyDetail) -> Result<Policy, String> {
    let kind: PolicyKind = detail
        .name
        .parse()
        .map_err(|error| format!("{error}; {}", known_policies()))?;
    let policy = policy_of_kind(kind, detail)?;
    let accepted = api_conversion::policy_detail(&policy);
    let figures = [
        ("weight", detail.weight.is_some(), accepted.weight.is_some()),
        (
            "priority",
            detail.priority.is_some(),
            accepted.priority.is_some(),
        ),
        ("load", detail.load.is_some(), accepted.load.is_some()),
        (
            "load degradation",
            detail.degradation.is_some(),
            accepted.degradation.is_some(),
        ),
        (
            "delay penalty",
            detail.delay_penalty.is_some(),
            accepted.delay_penalty.is_some(),
        ),
    ];
    match figures.iter().find(|(_, is_given, has)| *is_given && !has) {
        Some((figure, ..)) => Err(format!("policy {kind} has no {figure}; leave it out")),
        None => Ok(policy),
    }
}

fn known_policies() -> String {
    let names: Vec<&str> = PolicyKind::ALL.iter().map(|kind| kind.name()).collect();
    format!("known policies: {}", names.join(", "))
}

fn policy_of_kind(kind: PolicyKind, detail: &PolicyDetail) -> Result<Policy, String> {
    let (new_weight, new_priority) = (detail.weight.unwrap_or(1), detail.priority.unwrap_or(0));
    let new_load = parse_share("load", detail.load)?;
    let new_degradation = parse_share("load degradation", detail.degradation)?;
    let new_dpf = parse_share("delay penalty", detail.delay_penalty)?;
    let mut policy = kind.zeroed();
    match &mut policy {
        Policy::RoundRobin | Policy::Random => {}
        Policy::WeightedRoundRobin { weight } | Policy::WeightedRandom { weight } => {
            *weight = new_weight;
        }
        Policy::Priority { priority } => *priority = new_priority,
        Policy::LeastUsed { load } | Policy::RandomizedLeastUsed { load } => *load = new_load,
        Policy::LeastUsedDegradation { load, degradation }
        | Policy::PriorityLeastUsed { load, degradation }
        | Policy::RandomizedPriorityLeastUsed { load, degradation }
        | Policy::RandomizedLeastUsedDegradation { load, degradation }
        | Policy::PriorityLeastUsedDegradation { load, degradation }
        | Policy::RandomizedPriorityLeastUsedDegradation { load, degradation } => {
            (*load, *degradation) = (new_load, new_degradation);
        }
        Policy::WeightedRandomDpf { weight, dpf, .. } => {
            (*weight, *dpf) = (new_weight, new_dpf);
        }
        Policy::LeastUsedDpf { load, dpf, .. } => (*load, *dpf) = (new_load, new_dpf),
        Policy::LeastUsedDegradationDpf {
            load,
            degradation,
            dpf,
            ..
        }
        | Policy::PriorityLeastUsedDpf {
            load,
            degradation,
            dpf,
            ..
        }
        | Policy::PriorityLeastUsedDegradationDpf {
            load,
            degradation,
            dpf,
            ..
        } => (*load, *degradation, *dpf) = (new_load, new_degradation, new_dpf),
    }
    Ok(policy)
}

fn parse_share(parameter: &str, value: Option<f64>) -> Result<u32, String> {
    let value = value.unwrap_or(0.0);
    if !(0.0..=1.0).contains(&value) {
        return Err(format!("{parameter} {value} is out of range; use 0 to 1"));
    }
    Ok((value * f64::from(u32::MAX)).round() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_accepts_only_its_parameters() {
        let all = PolicyDetail {
            weight: Some(7),
            priority: Some(9),
            load: Some(0.5),
            degradation: Some(0.25),
            delay_penalty: Some(0.125),
            ..PolicyDetail::default()
        };
        for kind in PolicyKind::ALL {
            let accepted = api_conversion::policy_detail(&kind.zeroed());
            let given = PolicyDetail {
                name: kind.name().to_lowercase(),
                weight: all.weight.filter(|_| accepted.weight.is_some()),
                priority: all.priority.filter(|_| accepted.priority.is_some()),
                load: all.load.filter(|_| accepted.load.is_some()),
                degradation: all.degradation.filter(|_| accepted.degradation.is_some()),
                delay_penalty: all
                    .delay_penalty
                    .filter(|_| accepted.delay_penalty.is_some()),
                distance_ms: None,
            };
            let parsed = policy_from_detail(&given);
            assert!(parsed.is_ok(), "{kind}: {parsed:?}");
            let back = api_conversion::policy_detail(&parsed.unwrap());
            assert_eq!(back.weight, given.weight);
            assert_eq!(back.priority, given.priority);
            let is_close = |one: Option<f64>, two: Option<f64>| match (one, two) {
                (Some(one), Some(two)) => (one - two).abs() < 1e-9,
                (one, two) => one == two,
            };
            assert!(is_close(back.load, given.load), "{kind}");
            assert!(is_close(back.degradation, given.degradation), "{kind}");
            assert!(is_close(back.delay_penalty, given.delay_penalty), "{kind}");
            let name = kind.name().to_owned();
            let error = policy_from_detail(&PolicyDetail {
                name,
                ..all.clone()
            });
            assert!(error.expect_err("too much").contains("leave it out"));
        }
    }

    #[test]
    fn invalid_policies_are_refused_by_name() {
        let error_of = |name: &str| PolicyDetail {
            name: name.to_owned(),
            ..PolicyDetail::default()
        };
        assert!(
            policy_from_detail(&error_of("BEST"))
                .expect_err("none")
                .contains("LU-DPF")
        );
        let load = Some(1.5);
        let heavy = PolicyDetail {
            load,
            ..error_of("LU")
        };
        assert!(
            policy_from_detail(&heavy)
                .expect_err("too much")
                .contains("0 to 1")
        );
    }
}
