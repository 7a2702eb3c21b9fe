//! Invariants despite faults, checked during a run and at its end.

use super::world::World;
use crate::Violation;
use crate::time::Time;
use holdfast_proto::registrar::Registrar;
use holdfast_wire::rserpool::{ElementId, RegistrarId};
use std::collections::{BTreeMap, BTreeSet};

/// The invariants to check.
#[derive(Debug, Clone, Copy)]
pub struct Demands {
    /// Time at which all faults end, counted from `begin`.
    pub calm: Time,
    /// Time by which all must be well.
    pub rest: Time,
    /// Maximum time for which two registrars may both believe that they are an element's home, without faults.
    pub two_homes: Time,
}

/// Interval between checks.
pub(super) const LOOK: Time = Time(500_000_000);

/// The oracle's memory.
#[derive(Debug, Default)]
pub(super) struct Oracle {
    /// Since when each element has had two homes.
    shared: BTreeMap<ElementId, Time>,
    pub(super) violation: Option<Violation>,
}

impl World<'_> {
    pub(super) fn examine(&mut self, demands: Demands) {
        let calm = self.config.begin + demands.calm;
        self.homes(demands, calm);
        if self.now >= self.config.begin + demands.rest {
            self.rest(calm);
        }
    }

    fn violated(&mut self, what: String) {
        let at = self.now;
        self.oracle.violation.get_or_insert(Violation { at, what });
    }

    /// Checks that no element has two monitoring registrars for longer than allowed, without faults.
    fn homes(&mut self, demands: Demands, calm: Time) {
        let mut owners: BTreeMap<ElementId, u32> = BTreeMap::new();
        for registrar in self
            .registrars
            .iter()
            .filter_map(|node| node.machine.as_ref())
        {
            let own = registrar.id();
            registrar.each_element(|_, element| {
                if element.home == own {
                    *owners.entry(element.id).or_default() += 1;
                }
            });
        }
        let shared: BTreeSet<ElementId> = owners
            .into_iter()
            .filter(|(_, owners)| *owners > 1)
            .map(|(id, _)| id)
            .collect();
        self.oracle.shared.retain(|id, _| shared.contains(id));
        for id in shared {
            let since = *self.oracle.shared.entry(id).or_insert(self.now);
            if self.now.since(since.max(calm)) > demands.two_homes {
                self.violated(format!("element {} has two homes", id.0));
            }
        }
    }

    /// Checks the registrars' views, and that every user's requests have been served since the end of faults.
    fn rest(&mut self, calm: Time) {
        // Live elements, each with the home registrar that it knows.
        let elements = self.elements.iter();
        let live: BTreeMap<ElementId, Option<RegistrarId>> = elements
            .filter_map(|node| node.machine.as_ref())
            .map(|element| (element.id(), element.home()))
            .collect();
        let nodes = self.registrars.iter();
        let machines: Vec<&Registrar> = nodes.filter_map(|node| node.machine.as_ref()).collect();
        let homes: BTreeSet<RegistrarId> = machines.iter().map(|machine| machine.id()).collect();
        let mut wrong = Vec::new();
        for machine in &machines {
            view(machine, &live, &homes, &mut wrong);
        }
        for home in homes {
            let views: BTreeSet<u16> = machines.iter().map(|view| view.checksum(home)).collect();
            if views.len() > 1 {
                wrong.push(format!("views of registrar {}'s elements differ", home.0));
            }
        }
        for (index, user) in self.users.iter().enumerate() {
            if user.waits_since().is_some_and(|since| since < calm) {
                let calm = calm.as_secs_f64();
                wrong.push(format!("user {index} has waited since {calm} s"));
            }
        }
        if let Some(what) = wrong.into_iter().next() {
            self.violated(what);
        }
    }
}

/// Checks that each live element is in a registrar's view with a live home, the same as the element knows, and that no
/// dead element is.
fn view(
    registrar: &Registrar,
    live: &BTreeMap<ElementId, Option<RegistrarId>>,
    homes: &BTreeSet<RegistrarId>,
    wrong: &mut Vec<String>,
) {
    let own = registrar.id().0;
    let mut seen = BTreeSet::new();
    registrar.each_element(|_, element| {
        let (id, home) = (element.id.0, element.home.0);
        seen.insert(element.id);
        let what = match live.get(&element.id) {
            None => "is dead".to_owned(),
            Some(_) if !homes.contains(&element.home) => format!("has a dead home, {home}"),
            Some(Some(own)) if *own != element.home => format!("is of {}, not of {home}", own.0),
            Some(_) => return,
        };
        wrong.push(format!("registrar {own}: element {id} {what}"));
    });
    let lost = live.keys().find(|id| !seen.contains(*id));
    wrong.extend(lost.map(|id| format!("registrar {own} does not know element {}", id.0)));
}
