//! Re-registration of a registered element.

use crate::element::ElementKey;
use crate::handlespace::{Handlespace, RegisterError, RegistrationData, RegistrationOutcome};
use crate::pool::PoolRecord;
use holdfast_wire::rserpool::Policy;

impl<T> Handlespace<T> {
    /// Re-registers an element with unchanged data: equivalent to [`register`](Self::register) with the same values,
    /// including the payload, which is returned. None if the registration has ended.
    #[inline]
    pub fn register_again(&mut self, key: ElementKey) -> Option<&mut T> {
        let slot = self.elements.slot_of(key)?;
        let policy = self.elements.cold_parts[slot as usize].policy;
        self.reposition(slot, &policy);
        self.elements.cold_parts[slot as usize].payload.as_mut()
    }

    pub(crate) fn renew(
        &mut self,
        slot: u32,
        registration: RegistrationData<'_, T>,
    ) -> Result<RegistrationOutcome<T>, RegisterError> {
        let core = &self.elements.cores[slot as usize];
        let policy = registration.policy;
        check_pool_properties(&self.pools[core.pool as usize], &policy, registration.class)?;
        let rest = &mut self.elements.cold_parts[slot as usize];
        let previous = rest.payload.replace(registration.payload);
        rest.policy = policy;
        self.reposition(slot, &policy);
        if self.elements.cores[slot as usize].home != registration.home {
            self.rehome(slot, registration.home);
        }
        let key = self.elements.key_of(slot);
        Ok(RegistrationOutcome { key, previous })
    }

    /// Gives an element the position that its policy prescribes at re-registration.
    #[inline]
    fn reposition(&mut self, slot: u32, policy: &Policy) {
        let core = &self.elements.cores[slot as usize];
        let pool = &mut self.pools[core.pool as usize];
        let standing = core.selection_state;
        let updated = standing.after_reregistration(policy, || pool.selection.lowest());
        let cores = &mut self.elements.cores;
        if updated.value == standing.value {
            cores[slot as usize].selection_state = updated;
        } else {
            pool.selection
                .update(&mut self.blocks, cores, slot, updated);
        }
    }
}

#[inline]
pub(crate) fn check_pool_properties(
    pool: &PoolRecord,
    policy: &Policy,
    class: u32,
) -> Result<(), RegisterError> {
    let element = policy.kind();
    if pool.kind != element {
        let pool = pool.kind;
        return Err(RegisterError::Policy { pool, element });
    }
    if pool.class != class {
        let (pool, element) = (pool.class, class);
        return Err(RegisterError::Class { pool, element });
    }
    Ok(())
}
