//! What an image has that an earlier one of the same tree has not: all that must cross in the freeze.

use super::limits::{self, Malformed};
use super::{Content, FileId, Image, ObjectId, OpenFile, Pipe, Slot, Table, Terminal};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The way from one image to a later one of the same tree.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    tables: Part<u32, TableChanges>,
    files: Part<FileId, OpenFile>,
    pipes: Part<ObjectId, Pipe>,
    terminals: Part<ObjectId, Terminal>,
    contents: Part<ObjectId, ContentChanges>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Part<K: Ord, T> {
    set: BTreeMap<K, T>,
    gone: BTreeSet<K>,
}

impl<K: Ord, T> Default for Part<K, T> {
    fn default() -> Self {
        Self {
            set: BTreeMap::new(),
            gone: BTreeSet::new(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct TableChanges {
    pids: BTreeSet<i32>,
    slots: Part<u32, Slot>,
    descriptors_max: (u64, u64),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ContentChanges {
    /// Its chunks are left out.
    head: Content,
    chunks: Part<u64, super::Bytes>,
}

impl Image {
    /// What leads from `before` to this image.
    #[must_use]
    pub fn changes_since(&self, before: &Self) -> Changes {
        let empty_table = Table::default();
        let mut tables = part(&before.tables, &self.tables, |_, _| None);
        tables.set = changed(&before.tables, &self.tables)
            .map(|(id, now)| {
                let old = before.tables.get(id).unwrap_or(&empty_table);
                let slots = part(&old.slots, &now.slots, |_, slot| Some(*slot));
                let changes = TableChanges {
                    pids: now.pids.clone(),
                    slots,
                    descriptors_max: now.descriptors_max,
                };
                (*id, changes)
            })
            .collect();
        Changes {
            tables,
            files: part(&before.files, &self.files, |_, now| Some(now.clone())),
            ..self.changes_of_objects(before)
        }
    }

    /// What leads from `before` to a tree that has the same descriptors of the same open files. This image is of all its pipes,
    /// terminals and contents, and of those open files that may have changed or are in flight; `limits` are those of its tables.
    pub(in crate::process::files) fn changes_among(
        self,
        before: &Self,
        limits: &BTreeMap<u32, (u64, u64)>,
    ) -> Changes {
        let objects = self.changes_of_objects(before);
        let tables = before.tables.iter().filter_map(|(id, table)| {
            let descriptors_max = *limits.get(id)?;
            let changes = TableChanges {
                pids: table.pids.clone(),
                slots: Part::default(),
                descriptors_max,
            };
            (table.descriptors_max != descriptors_max).then_some((*id, changes))
        });
        let files = self.files.into_iter();
        let files = files.filter(|(id, now)| before.files.get(id) != Some(now));
        Changes {
            tables: Part {
                set: tables.collect(),
                gone: BTreeSet::new(),
            },
            files: Part {
                set: files.collect(),
                gone: BTreeSet::new(),
            },
            ..objects
        }
    }

    /// Those of all that open files share.
    fn changes_of_objects(&self, before: &Self) -> Changes {
        let mut contents = part(&before.contents, &self.contents, |_, _| None);
        contents.set = changed(&before.contents, &self.contents)
            .map(|(id, now)| (*id, content_changes(before.contents.get(id), now)))
            .collect();
        Changes {
            contents,
            pipes: part(&before.pipes, &self.pipes, |_, now| Some(now.clone())),
            terminals: part(&before.terminals, &self.terminals, |_, now| {
                Some(now.clone())
            }),
            ..Changes::default()
        }
    }

    /// The image that `changes` lead to from this one.
    ///
    /// # Errors
    /// [`Malformed`] when the outcome contradicts itself or exceeds the limits.
    pub fn apply(&self, changes: Changes) -> Result<Self, Malformed> {
        let mut image = self.clone();
        let (tables, contents) = (changes.tables, changes.contents);
        image.tables.retain(|id, _| !tables.gone.contains(id));
        for (id, change) in tables.set {
            let table = image.tables.entry(id).or_default();
            table.pids = change.pids;
            table.descriptors_max = change.descriptors_max;
            change.slots.apply(&mut table.slots);
        }
        image.contents.retain(|id, _| !contents.gone.contains(id));
        for (id, change) in contents.set {
            let mut chunks = image
                .contents
                .remove(&id)
                .map(|content| content.chunks)
                .unwrap_or_default();
            change.chunks.apply(&mut chunks);
            let content = Content {
                chunks,
                ..change.head
            };
            image.contents.insert(id, content);
        }
        changes.files.apply(&mut image.files);
        changes.pipes.apply(&mut image.pipes);
        changes.terminals.apply(&mut image.terminals);
        limits::check(&image)?;
        Ok(image)
    }
}

impl Changes {
    /// Reads changes that came from another node; [`Image::apply`] checks what they lead to.
    ///
    /// # Errors
    /// [`Malformed`] for bytes that are no changes.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        Ok(postcard::from_bytes(bytes)?)
    }

    /// Whether any table has something else at a number, or other processes.
    #[must_use]
    pub fn concern_tables(&self) -> bool {
        !self.tables.set.is_empty() || !self.tables.gone.is_empty()
    }
}

impl<K: Ord, T> Part<K, T> {
    fn apply(self, map: &mut BTreeMap<K, T>) {
        map.retain(|key, _| !self.gone.contains(key));
        map.extend(self.set);
    }
}

/// Entries of `now` that `before` has not, or has otherwise.
fn changed<'a, K: Ord, T: PartialEq>(
    before: &'a BTreeMap<K, T>,
    now: &'a BTreeMap<K, T>,
) -> impl Iterator<Item = (&'a K, &'a T)> {
    now.iter()
        .filter(|(key, value)| before.get(key) != Some(*value))
}

fn part<K: Ord + Copy, T: PartialEq, C>(
    before: &BTreeMap<K, T>,
    now: &BTreeMap<K, T>,
    change: impl Fn(&K, &T) -> Option<C>,
) -> Part<K, C> {
    let set = changed(before, now).filter_map(|(key, value)| Some((*key, change(key, value)?)));
    Part {
        set: set.collect(),
        gone: before
            .keys()
            .filter(|key| !now.contains_key(key))
            .copied()
            .collect(),
    }
}

fn content_changes(before: Option<&Content>, now: &Content) -> ContentChanges {
    let none = BTreeMap::new();
    let old = before.map_or(&none, |content| &content.chunks);
    ContentChanges {
        head: Content {
            form: now.form.clone(),
            access: now.access,
            size: now.size,
            elsewhere: now.elsewhere,
            chunks: BTreeMap::new(),
        },
        chunks: part(old, &now.chunks, |_, bytes| Some(bytes.clone())),
    }
}
