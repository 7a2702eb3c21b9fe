//! Differences between two images of the same tree: all that must be sent during the freeze.

use super::limits::{self, InvalidImage};
use super::{
    DescriptorSlot, DescriptorTable, FileId, FilesImage, NamelessContent, ObjectId, OpenFile, Pipe,
    PseudoTerminal,
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::mem::discriminant;

/// Changes that turn one image into a later one of the same tree.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesImageChanges {
    tables: BTreeMapChanges<u32, TableChanges>,
    files: BTreeMapChanges<FileId, OpenFile>,
    pipes: BTreeMapChanges<ObjectId, Pipe>,
    terminals: BTreeMapChanges<ObjectId, PseudoTerminal>,
    contents: BTreeMapChanges<ObjectId, ContentChanges>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct BTreeMapChanges<K: Ord, T> {
    set: BTreeMap<K, T>,
    removed: BTreeSet<K>,
}

impl<K: Ord, T> Default for BTreeMapChanges<K, T> {
    fn default() -> Self {
        Self {
            set: BTreeMap::new(),
            removed: BTreeSet::new(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct TableChanges {
    pids: BTreeSet<i32>,
    slots: BTreeMapChanges<u32, DescriptorSlot>,
    descriptors_max: (u64, u64),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ContentChanges {
    /// The content without its chunks.
    without_chunks: NamelessContent,
    chunks: BTreeMapChanges<u64, super::ByteString>,
}

impl FilesImage {
    /// Returns the changes from `before` to this image.
    #[must_use]
    pub fn changes_since(&self, before: &Self) -> FilesImageChanges {
        let empty_table = DescriptorTable::default();
        let mut tables = map_changes(&before.tables, &self.tables, |_, _| None);
        tables.set = changed_entries(&before.tables, &self.tables)
            .map(|(id, now)| {
                let old = before.tables.get(id).unwrap_or(&empty_table);
                let slots = map_changes(&old.slots, &now.slots, |_, slot| Some(*slot));
                let changes = TableChanges {
                    pids: now.pids.clone(),
                    slots,
                    descriptors_max: now.descriptors_max,
                };
                (*id, changes)
            })
            .collect();
        FilesImageChanges {
            tables,
            files: map_changes(&before.files, &self.files, |_, now| Some(now.clone())),
            ..self.object_changes(before)
        }
    }

    /// Returns the changes from `before` to a tree with the same descriptors of the same open files. This image
    /// contains all pipes, terminals and contents of the tree, and the open files that may have changed or are in
    /// flight; `limits` are the limits of its tables.
    pub(in crate::files) fn changes_of_same_files(
        self,
        before: &Self,
        limits: &BTreeMap<u32, (u64, u64)>,
    ) -> FilesImageChanges {
        let objects = self.object_changes(before);
        let tables = before.tables.iter().filter_map(|(id, table)| {
            let descriptors_max = *limits.get(id)?;
            let changes = TableChanges {
                pids: table.pids.clone(),
                slots: BTreeMapChanges::default(),
                descriptors_max,
            };
            (table.descriptors_max != descriptors_max).then_some((*id, changes))
        });
        let files = self.files.into_iter();
        let files = files.filter(|(id, now)| before.files.get(id) != Some(now));
        FilesImageChanges {
            tables: BTreeMapChanges {
                set: tables.collect(),
                removed: BTreeSet::new(),
            },
            files: BTreeMapChanges {
                set: files.collect(),
                removed: BTreeSet::new(),
            },
            ..objects
        }
    }

    /// Returns the changes of objects that open files share.
    fn object_changes(&self, before: &Self) -> FilesImageChanges {
        let mut contents = map_changes(&before.contents, &self.contents, |_, _| None);
        contents.set = changed_entries(&before.contents, &self.contents)
            .map(|(id, now)| (*id, content_changes(before.contents.get(id), now)))
            .collect();
        FilesImageChanges {
            contents,
            pipes: map_changes(&before.pipes, &self.pipes, |_, now| Some(now.clone())),
            terminals: map_changes(&before.terminals, &self.terminals, |_, now| {
                Some(now.clone())
            }),
            ..FilesImageChanges::default()
        }
    }

    /// Applies `changes` to this image. Unchanged parts cost nothing.
    ///
    /// # Errors
    /// [`InvalidImage`] if the result contradicts itself or exceeds the limits; the image is unusable then.
    pub fn apply(&mut self, changes: FilesImageChanges) -> Result<PreviousValues, InvalidImage> {
        let affects_known_files_only = changes.affect_files_only(self);
        let FilesImageChanges {
            tables,
            files,
            pipes,
            terminals,
            contents,
        } = changes;
        for id in &tables.removed {
            self.tables.remove(id);
        }
        for (id, change) in tables.set {
            let table = self.tables.entry(id).or_default();
            table.pids = change.pids;
            table.descriptors_max = change.descriptors_max;
            change.slots.apply(&mut table.slots);
        }
        let mut former = PreviousValues::default();
        for id in contents.removed {
            former.contents.insert(id, self.contents.remove(&id));
        }
        for (id, change) in contents.set {
            let old = self.contents.remove(&id);
            let mut chunks = old
                .as_ref()
                .map_or_else(BTreeMap::new, |old| old.chunks.clone());
            change.chunks.apply(&mut chunks);
            let content = NamelessContent {
                chunks,
                ..change.without_chunks
            };
            self.contents.insert(id, content);
            former.contents.entry(id).or_insert(old);
        }
        for id in files.removed {
            former.files.insert(id, self.files.remove(&id));
        }
        for (id, file) in files.set {
            let old = self.files.insert(id, file);
            former.files.entry(id).or_insert(old);
        }
        pipes.apply(&mut self.pipes);
        terminals.apply(&mut self.terminals);
        match affects_known_files_only {
            true => limits::check_files(self, former.files.keys())?,
            false => limits::check(self)?,
        }
        Ok(former)
    }
}

/// Parts of an image that can be judged one by one: all of them, or the changed ones.
#[derive(Debug)]
pub(crate) struct FilesImageParts<'a> {
    /// `RLIMIT_NOFILE` of tables, soft and hard.
    pub limits: Vec<(u64, u64)>,
    /// Open files.
    pub files: Vec<&'a OpenFile>,
    /// Pipes and FIFOs.
    pub pipes: Vec<&'a Pipe>,
    /// Terminals.
    pub terminals: Vec<&'a PseudoTerminal>,
    /// Contents; in changes, without their chunks.
    pub contents: Vec<&'a NamelessContent>,
}

impl FilesImage {
    /// Returns all parts of the image, for the image judge.
    pub(crate) fn parts(&self) -> FilesImageParts<'_> {
        let Self {
            tables,
            files,
            pipes,
            terminals,
            contents,
        } = self;
        // Slots and PIDs refer to open files and processes of the tree only, so that nothing in them needs to be
        // judged.
        let limit = |table: &DescriptorTable| {
            let DescriptorTable {
                pids: _,
                slots: _,
                descriptors_max,
            } = table;
            *descriptors_max
        };
        FilesImageParts {
            limits: tables.values().map(limit).collect(),
            files: files.values().collect(),
            pipes: pipes.values().collect(),
            terminals: terminals.values().collect(),
            contents: contents.values().collect(),
        }
    }
}

impl FilesImageChanges {
    /// Returns all parts that are new or changed.
    pub(crate) fn parts(&self) -> FilesImageParts<'_> {
        let Self {
            tables,
            files,
            pipes,
            terminals,
            contents,
        } = self;
        let limit = |table: &TableChanges| {
            let TableChanges {
                pids: _,
                slots: _,
                descriptors_max,
            } = table;
            *descriptors_max
        };
        FilesImageParts {
            limits: tables.set.values().map(limit).collect(),
            files: files.set.values().collect(),
            pipes: pipes.set.values().collect(),
            terminals: terminals.set.values().collect(),
            contents: contents.set.values().map(ContentChanges::content).collect(),
        }
    }
}

impl ContentChanges {
    fn content(&self) -> &NamelessContent {
        // Chunks are the tree's own bytes.
        let Self {
            without_chunks: head,
            chunks: _,
        } = self;
        head
    }
}

/// Former values of the entries that [`FilesImage::apply`] has changed; `None` for a new entry.
#[derive(Debug, Default)]
pub struct PreviousValues {
    /// Open files.
    pub files: BTreeMap<FileId, Option<OpenFile>>,
    /// Contents.
    pub contents: BTreeMap<ObjectId, Option<NamelessContent>>,
}

impl PreviousValues {
    /// Returns the former state of an open file with the present state `now`.
    pub fn file<'a>(&'a self, id: FileId, current: &'a OpenFile) -> Option<&'a OpenFile> {
        self.files.get(&id).map_or(Some(current), Option::as_ref)
    }

    /// Returns the former state of a content with the present state `now`.
    pub fn content<'a>(
        &'a self,
        id: ObjectId,
        current: &'a NamelessContent,
    ) -> Option<&'a NamelessContent> {
        self.contents.get(&id).map_or(Some(current), Option::as_ref)
    }
}

impl FilesImageChanges {
    /// Decodes changes that another node sent; [`FilesImage::apply`] checks the result.
    ///
    /// # Errors
    /// [`InvalidImage`] if the bytes do not encode changes.
    pub fn decode(bytes: &[u8]) -> Result<Self, InvalidImage> {
        Ok(postcard::from_bytes(bytes)?)
    }

    /// Returns true if only open files change that the image has, and each keeps its kind: all references to them stay
    /// valid.
    fn affect_files_only(&self, image: &FilesImage) -> bool {
        let same_kind = |(id, new): (&FileId, &OpenFile)| {
            let old = image.files.get(id);
            old.is_some_and(|old| discriminant(&old.kind) == discriminant(&new.kind))
        };
        !self.affect_tables()
            && self.pipes.is_empty()
            && self.terminals.is_empty()
            && self.contents.is_empty()
            && self.files.removed.is_empty()
            && self.files.set.iter().all(same_kind)
    }

    /// Returns the open files that are new or changed.
    pub fn files(&self) -> impl Iterator<Item = &OpenFile> {
        self.files.set.values()
    }

    /// Returns true if the descriptors or the processes of any table change.
    #[must_use]
    pub fn affect_tables(&self) -> bool {
        !self.tables.is_empty()
    }
}

impl<K: Ord, T> BTreeMapChanges<K, T> {
    fn is_empty(&self) -> bool {
        self.set.is_empty() && self.removed.is_empty()
    }

    fn apply(self, map: &mut BTreeMap<K, T>) {
        for key in &self.removed {
            map.remove(key);
        }
        map.extend(self.set);
    }
}

/// Returns the entries of `now` that are absent from `before` or different there.
fn changed_entries<'a, K: Ord, T: PartialEq>(
    previous: &'a BTreeMap<K, T>,
    current: &'a BTreeMap<K, T>,
) -> impl Iterator<Item = (&'a K, &'a T)> {
    current
        .iter()
        .filter(|(key, value)| previous.get(key) != Some(*value))
}

fn map_changes<K: Ord + Copy, T: PartialEq, C>(
    previous: &BTreeMap<K, T>,
    current: &BTreeMap<K, T>,
    change: impl Fn(&K, &T) -> Option<C>,
) -> BTreeMapChanges<K, C> {
    let set = changed_entries(previous, current)
        .filter_map(|(key, value)| Some((*key, change(key, value)?)));
    BTreeMapChanges {
        set: set.collect(),
        removed: previous
            .keys()
            .filter(|key| !current.contains_key(key))
            .copied()
            .collect(),
    }
}

fn content_changes(
    previous: Option<&NamelessContent>,
    current: &NamelessContent,
) -> ContentChanges {
    let empty = BTreeMap::new();
    let old = previous.map_or(&empty, |content| &content.chunks);
    ContentChanges {
        without_chunks: NamelessContent {
            form: current.form.clone(),
            access: current.access,
            times_ns: current.times_ns,
            size: current.size,
            mapped_memory: current.mapped_memory,
            chunks: BTreeMap::new(),
        },
        chunks: map_changes(old, &current.chunks, |_, bytes| Some(bytes.clone())),
    }
}
