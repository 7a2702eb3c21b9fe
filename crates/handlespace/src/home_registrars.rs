//! The home registrars of elements.
//!
//! A group contains the elements of one pool with the same home registrar. A registrar owns groups, so its elements can
//! be listed by pool, as a handle table requires.

use crate::checksum::Checksum;
use crate::element::ElementCore;
use crate::record_index::RecordIndex;
use holdfast_wire::rserpool::RegistrarId;
use prefetch_index::prefetch_index;
use smallvec::SmallVec;

/// Up to this number of members, a group's record fills two cache lines; more members are stored elsewhere.
const INLINE_MEMBERS: usize = 20;

/// Elements of one pool with the same home registrar.
#[derive(Debug, Clone)]
#[repr(C, align(64))]
pub(crate) struct HomeGroup {
    begin: [u32; 0],
    pub(crate) members: SmallVec<[u32; INLINE_MEMBERS]>,
    pub(crate) generation: u32,
    pub(crate) home: RegistrarId,
    pool: u32,
    owner: u32,
    /// Index in the owner's list.
    index_in_owner: u32,
}

/// A registrar that is the home of at least one element.
#[derive(Debug, Clone)]
pub(crate) struct HomeRegistrar {
    pub(crate) home: RegistrarId,
    pub(crate) groups: Vec<u32>,
    pub(crate) elements: usize,
    pub(crate) checksum: Checksum,
}

/// All groups and owners. Lists of groups and of members are dense: a removed entry is replaced by the last one.
#[derive(Debug, Clone)]
pub(crate) struct HomeRegistrars {
    pub(crate) groups: Vec<HomeGroup>,
    free_groups: Vec<u32>,
    group_index: RecordIndex,
    owners: Vec<HomeRegistrar>,
    free_owners: Vec<u32>,
    owner_index: RecordIndex,
    seed: u64,
}

impl HomeRegistrars {
    pub(crate) fn new(seed: u64) -> HomeRegistrars {
        HomeRegistrars {
            groups: Vec::new(),
            free_groups: Vec::new(),
            group_index: RecordIndex::new(),
            owners: Vec::new(),
            free_owners: Vec::new(),
            owner_index: RecordIndex::new(),
            seed,
        }
    }

    /// Returns the owner's record of a registrar, if it is the home of any element.
    pub(crate) fn owner(&self, home: RegistrarId) -> Option<&HomeRegistrar> {
        let owner = self.find_owner(home)?;
        Some(&self.owners[owner as usize])
    }

    /// Returns the groups of a pool: at most one per registrar.
    pub(crate) fn groups_of_pool(&self, pool: u32) -> impl Iterator<Item = &HomeGroup> {
        let owners = self.owners.iter().filter(|owner| !owner.groups.is_empty());
        owners.filter_map(move |owner| {
            let number = self.find_group(pool, owner.home)?;
            Some(&self.groups[number as usize])
        })
    }

    /// Makes `home` the home of an element that has none. `block` is the element's block of the checksum; `hint` is the
    /// group that it probably belongs to, and is set to its group.
    #[inline]
    pub(crate) fn insert(
        &mut self,
        cores: &mut [ElementCore],
        slot: u32,
        home: RegistrarId,
        block: u64,
        hint: &mut u32,
    ) {
        let core = &mut cores[slot as usize];
        let number = match self.groups.get(*hint as usize) {
            Some(group)
                if group.pool == core.pool && group.home == home && !group.members.is_empty() =>
            {
                *hint
            }
            _ => self.group_or_new(core.pool, home),
        };
        *hint = number;
        let group = &mut self.groups[number as usize];
        core.group = number;
        core.home = home;
        core.index_in_group = group.members.len() as u32;
        group.members.push(slot);
        let owner = &mut self.owners[group.owner as usize];
        owner.elements += 1;
        owner.checksum.add(block);
    }

    /// Prefetches the memory that [`remove`](Self::remove) uses.
    #[inline]
    pub(crate) fn prefetch(&self, cores: &[ElementCore], core: &ElementCore) {
        let members = &self.groups[core.group as usize].members;
        prefetch_index(members, core.index_in_group as usize);
        if let Some(&last) = members.last() {
            prefetch_index(cores, last as usize);
        }
    }

    /// Prefetches a group's record.
    #[inline]
    pub(crate) fn prefetch_group(&self, group: u32) {
        if let Some(group) = self.groups.get(group as usize) {
            prefetch_index(group.begin.as_slice(), 0);
            prefetch_index(group.begin.as_slice(), 16);
        }
    }

    /// Prefetches the place of a group's next member.
    #[inline]
    pub(crate) fn prefetch_end(&self, group: u32) {
        if let Some(group) = self.groups.get(group as usize) {
            prefetch_index(&group.members, group.members.len());
        }
    }

    /// Prefetches an element's place in its group, and the place after the last member.
    #[inline]
    pub(crate) fn prefetch_member(&self, core: &ElementCore) {
        if let Some(group) = self.groups.get(core.group as usize) {
            prefetch_index(&group.members, core.index_in_group as usize);
            prefetch_index(&group.members, group.members.len());
        }
    }

    /// Prefetches the last member of a group.
    #[inline]
    pub(crate) fn prefetch_last(&self, cores: &[ElementCore], group: u32) {
        let group = self.groups.get(group as usize);
        if let Some(&last) = group.and_then(|group| group.members.last()) {
            prefetch_index(cores, last as usize);
        }
    }

    /// Removes an element from its home's group.
    #[inline]
    pub(crate) fn remove(&mut self, cores: &mut [ElementCore], slot: u32, block: u64) {
        let ElementCore {
            group,
            index_in_group: member,
            ..
        } = cores[slot as usize];
        let number = group;
        let group = &mut self.groups[number as usize];
        group.members.swap_remove(member as usize);
        if let Some(&moved) = group.members.get(member as usize) {
            cores[moved as usize].index_in_group = member;
        }
        let owner = &mut self.owners[group.owner as usize];
        owner.elements -= 1;
        owner.checksum.subtract(block);
        if group.members.is_empty() {
            self.remove_group(number);
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        let members = self.groups.iter().map(|group| &group.members);
        let members = members.filter(|members| members.spilled());
        let members: usize = members.map(SmallVec::capacity).sum();
        let owned: usize = self.owners.iter().map(|o| o.groups.capacity()).sum();
        let lists = self.free_groups.capacity() + self.free_owners.capacity();
        (members + owned + lists) * size_of::<u32>()
            + self.groups.capacity() * size_of::<HomeGroup>()
            + self.owners.capacity() * size_of::<HomeRegistrar>()
            + self.group_index.heap_bytes()
            + self.owner_index.heap_bytes()
    }

    fn hash(&self, pool: u32, home: RegistrarId) -> u64 {
        hash_with(self.seed ^ u64::from(home.0), pool)
    }

    fn find_owner(&self, home: RegistrarId) -> Option<u32> {
        let hash = hash_with(self.seed, home.0);
        self.owner_index
            .find(hash, |owner| self.owners[owner as usize].home == home)
    }

    /// Returns the group of a pool and a registrar, created if missing.
    #[inline]
    fn group_or_new(&mut self, pool: u32, home: RegistrarId) -> u32 {
        self.find_group(pool, home)
            .unwrap_or_else(|| self.add_group(pool, home))
    }

    #[inline]
    fn find_group(&self, pool: u32, home: RegistrarId) -> Option<u32> {
        self.group_index.find(self.hash(pool, home), |number| {
            let group = &self.groups[number as usize];
            group.pool == pool && group.home == home
        })
    }

    fn add_group(&mut self, pool: u32, home: RegistrarId) -> u32 {
        let hash = self.hash(pool, home);
        let owner = match self.find_owner(home) {
            Some(owner) => owner,
            None => self.add_owner(home),
        };
        let groups = &mut self.owners[owner as usize].groups;
        let mut group = HomeGroup {
            begin: [],
            members: SmallVec::new(),
            generation: 0,
            home,
            pool,
            owner,
            index_in_owner: groups.len() as u32,
        };
        let number = match self.free_groups.pop() {
            Some(number) => {
                let free = &mut self.groups[number as usize];
                group.generation = free.generation;
                *free = group;
                number
            }
            None => {
                self.groups.push(group);
                self.groups.len() as u32 - 1
            }
        };
        groups.push(number);
        self.group_index.insert(hash, number);
        number
    }

    fn remove_group(&mut self, number: u32) {
        let group = &mut self.groups[number as usize];
        group.generation = group.generation.wrapping_add(1);
        group.members = SmallVec::new();
        let (pool, number_of_owner) = (group.pool, group.owner);
        let in_owner = group.index_in_owner;
        let home = group.home;
        let hash = self.hash(pool, home);
        self.group_index.remove(hash, number);
        let owner = &mut self.owners[number_of_owner as usize];
        owner.groups.swap_remove(in_owner as usize);
        if let Some(&moved) = owner.groups.get(in_owner as usize) {
            self.groups[moved as usize].index_in_owner = in_owner;
        }
        if owner.groups.is_empty() {
            self.owner_index
                .remove(hash_with(self.seed, home.0), number_of_owner);
            self.free_owners.push(number_of_owner);
        }
        self.free_groups.push(number);
    }

    fn add_owner(&mut self, home: RegistrarId) -> u32 {
        let owner = HomeRegistrar {
            home,
            groups: Vec::new(),
            elements: 0,
            checksum: Checksum::default(),
        };
        let number = match self.free_owners.pop() {
            Some(number) => {
                self.owners[number as usize] = owner;
                number
            }
            None => {
                self.owners.push(owner);
                self.owners.len() as u32 - 1
            }
        };
        self.owner_index
            .insert(hash_with(self.seed, home.0), number);
        number
    }
}

/// Hashes a hash and a number: their product, folded.
#[inline]
pub(crate) fn hash_with(hash: u64, number: u32) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    let spread = hash ^ (u64::from(number) + 1).wrapping_mul(ODD);
    let product = u128::from(spread) * u128::from(ODD.rotate_left(32) | 1);
    (product as u64) ^ (product >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_group_fits_two_cache_lines() {
        assert_eq!(size_of::<HomeGroup>(), 128);
    }
}
