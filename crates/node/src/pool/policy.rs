//! Conversion of a policy's name and parameters.

use holdfast_api::control::PolicyDetail;
use holdfast_wire::rserpool::{Policy, PolicyKind};

use crate::entries;

/// Returns the policy that a program requests. Missing parameters are 0, a missing weight is 1.
///
/// # Errors
/// Unknown policy, a share outside its range, or a parameter that the policy does not have; as text.
pub(super) fn parse(detail: &PolicyDetail) -> Result<Policy, String> {
    let kind: PolicyKind = detail
        .name
        .parse()
        .map_err(|error| format!("{error}; {}", known()))?;
    let policy = filled(kind, detail)?;
    let shown = entries::policy(&policy);
    let figures = [
        ("weight", detail.weight.is_some(), shown.weight.is_some()),
        (
            "priority",
            detail.priority.is_some(),
            shown.priority.is_some(),
        ),
        ("load", detail.load.is_some(), shown.load.is_some()),
        (
            "load degradation",
            detail.degradation.is_some(),
            shown.degradation.is_some(),
        ),
        (
            "delay penalty",
            detail.delay_penalty.is_some(),
            shown.delay_penalty.is_some(),
        ),
    ];
    match figures.iter().find(|(_, given, has)| *given && !has) {
        Some((figure, ..)) => Err(format!("policy {kind} has no {figure}; leave it out")),
        None => Ok(policy),
    }
}

fn known() -> String {
    let names: Vec<&str> = PolicyKind::ALL.iter().map(|kind| kind.name()).collect();
    format!("there are {}", names.join(", "))
}

fn filled(kind: PolicyKind, detail: &PolicyDetail) -> Result<Policy, String> {
    let (new_weight, new_priority) = (detail.weight.unwrap_or(1), detail.priority.unwrap_or(0));
    let new_load = share("load", detail.load)?;
    let new_degradation = share("load degradation", detail.degradation)?;
    let new_dpf = share("delay penalty", detail.delay_penalty)?;
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

fn share(what: &str, value: Option<f64>) -> Result<u32, String> {
    let value = value.unwrap_or(0.0);
    if !(0.0..=1.0).contains(&value) {
        return Err(format!("a {what} of {value} is none; it is from 0 to 1"));
    }
    Ok((value * f64::from(u32::MAX)).round() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_takes_its_figures_and_no_others() {
        let all = PolicyDetail {
            weight: Some(7),
            priority: Some(9),
            load: Some(0.5),
            degradation: Some(0.25),
            delay_penalty: Some(0.125),
            ..PolicyDetail::default()
        };
        for kind in PolicyKind::ALL {
            let shown = entries::policy(&kind.zeroed());
            let own = PolicyDetail {
                name: kind.name().to_lowercase(),
                weight: all.weight.filter(|_| shown.weight.is_some()),
                priority: all.priority.filter(|_| shown.priority.is_some()),
                load: all.load.filter(|_| shown.load.is_some()),
                degradation: all.degradation.filter(|_| shown.degradation.is_some()),
                delay_penalty: all.delay_penalty.filter(|_| shown.delay_penalty.is_some()),
                distance_ms: None,
            };
            let parsed = parse(&own);
            assert!(parsed.is_ok(), "{kind}: {parsed:?}");
            let back = entries::policy(&parsed.unwrap());
            assert_eq!(back.weight, own.weight);
            assert_eq!(back.priority, own.priority);
            let near = |one: Option<f64>, two: Option<f64>| match (one, two) {
                (Some(one), Some(two)) => (one - two).abs() < 1e-9,
                (one, two) => one == two,
            };
            assert!(near(back.load, own.load), "{kind}");
            assert!(near(back.degradation, own.degradation), "{kind}");
            assert!(near(back.delay_penalty, own.delay_penalty), "{kind}");
            let name = kind.name().to_owned();
            let error = parse(&PolicyDetail {
                name,
                ..all.clone()
            });
            assert!(error.expect_err("too much").contains("leave it out"));
        }
    }

    #[test]
    fn what_is_no_policy_is_refused_in_words() {
        let named = |name: &str| PolicyDetail {
            name: name.to_owned(),
            ..PolicyDetail::default()
        };
        assert!(parse(&named("BEST")).expect_err("none").contains("LU-DPF"));
        let load = Some(1.5);
        let heavy = PolicyDetail {
            load,
            ..named("LU")
        };
        assert!(parse(&heavy).expect_err("too much").contains("0 to 1"));
    }
}
