"""Short instructions in many forms: the prompts of the example.

A form is a template with one blank, and the kind of subject that fills it. Every pair of a form and a subject is one
instruction, and none occurs twice, so that the held-out ones are never trained on.
"""

from __future__ import annotations

import random

SUBJECTS: dict[str, tuple[str, ...]] = {
    "thing": (
        "a bicycle", "a candle", "a compass", "a dictionary", "a garden hose", "a guitar", "a hammer", "a kettle",
        "a ladder", "a lighthouse", "a map", "a microscope", "a mirror", "a needle", "a notebook", "a parachute",
        "a piano", "a pillow", "a refrigerator", "a sailing boat", "a scarf", "a sewing machine", "a spoon",
        "a telescope", "a thermometer", "a toothbrush", "a tractor", "a typewriter", "a violin", "a wheelbarrow",
        "a windmill", "an alarm clock", "an elevator", "an envelope", "an umbrella", "a camera",
    ),
    "animal": (
        "a bat", "a bear", "a bee", "a butterfly", "a camel", "a cat", "a chameleon", "a cow", "a crab", "a crocodile",
        "a dolphin", "a duck", "an eagle", "an elephant", "a fox", "a frog", "a giraffe", "a goat", "a hedgehog",
        "a horse", "a kangaroo", "a lion", "an octopus", "an owl", "a parrot", "a penguin", "a rabbit", "a salmon",
        "a shark", "a snail", "a spider", "a squirrel", "a tiger", "a turtle", "a whale", "a wolf",
    ),
    "country": (
        "Argentina", "Australia", "Austria", "Brazil", "Canada", "Chile", "China", "Cuba", "Denmark", "Egypt",
        "Ethiopia", "Finland", "France", "Germany", "Greece", "Hungary", "Iceland", "India", "Indonesia", "Ireland",
        "Italy", "Japan", "Kenya", "Mexico", "Morocco", "Nepal", "Nigeria", "Norway", "Peru", "Poland", "Portugal",
        "South Korea", "Spain", "Thailand", "Turkey", "Vietnam",
    ),
    "science": (
        "a black hole", "a chemical bond", "a comet", "a glacier", "a rainbow", "a solar eclipse", "a volcano",
        "an atom", "an earthquake", "blood pressure", "condensation", "electricity", "erosion", "evaporation",
        "evolution", "fermentation", "friction", "gravity", "inertia", "lightning", "magnetism", "metabolism",
        "natural selection", "photosynthesis", "plate tectonics", "pollination", "radioactivity", "sound",
        "static electricity", "the greenhouse effect", "the immune system", "the ozone layer", "the periodic table",
        "the speed of light", "the water cycle", "tides",
    ),
    "activity": (
        "baking bread", "bird watching", "camping", "cleaning a kitchen", "cooking rice", "dancing", "drawing a face",
        "fishing", "growing tomatoes", "hiking", "ironing a shirt", "jogging", "knitting", "learning a language",
        "making coffee", "making new friends", "meditating", "packing a suitcase", "painting a wall",
        "planning a birthday party", "playing chess", "preparing for an exam", "public speaking", "reading aloud",
        "repairing a flat tire", "riding a horse", "saving money", "singing in a choir", "swimming",
        "taking photographs", "taking care of a dog", "training for a race", "washing a car", "watering plants",
        "writing a diary", "writing a letter",
    ),
    "job": (
        "a baker", "a bus driver", "a carpenter", "a chemist", "a dentist", "a detective", "a doctor", "a farmer",
        "a firefighter", "a fisherman", "a gardener", "a journalist", "a judge", "a lawyer", "a librarian",
        "a mechanic", "a musician", "a nurse", "a painter", "a pharmacist", "a photographer", "a pilot", "a plumber",
        "a police officer", "a programmer", "a sailor", "a scientist", "a shoemaker", "a tailor", "a teacher",
        "a translator", "a veterinarian", "a waiter", "an architect", "an astronaut", "an engineer",
    ),
    "word": (
        "ancient", "angry", "beautiful", "brave", "bright", "calm", "careful", "cheap", "clever", "cold", "curious",
        "dangerous", "difficult", "early", "empty", "famous", "fast", "friendly", "generous", "gentle", "happy",
        "honest", "huge", "important", "lazy", "loud", "modern", "narrow", "nervous", "polite", "proud", "quiet",
        "rare", "strong", "tired", "useful",
    ),
    "sentence": (
        "The train was late because of the snow.", "She forgot her keys on the kitchen table.",
        "We are going to the market tomorrow morning.", "He reads a book every week.",
        "The children play in the garden after school.", "My brother wants to become a doctor.",
        "The museum is closed on Mondays.", "They built a small house near the lake.",
        "I would like a cup of tea with milk.", "The dog barked at the mail carrier.",
        "Our team won the game by two points.", "It rained all night, but the morning was sunny.",
        "The teacher explained the problem twice.", "You should drink more water in summer.",
        "The bread in this shop is always fresh.", "We lost our way in the old town.",
        "The phone rang while I was cooking dinner.", "She speaks three languages very well.",
        "The movie was longer than we expected.", "He repaired the old radio by himself.",
        "The flowers on the balcony need some water.", "I have never seen such a big library.",
        "The meeting starts at nine o'clock.", "They sold their car and bought two bicycles.",
        "The soup tastes better on the second day.", "My grandmother tells wonderful stories.",
        "The store sells apples, pears and plums.", "He was too tired to finish his homework.",
        "The new bridge makes the way to work shorter.", "We watched the stars from the roof.",
        "The cat sleeps on the warm windowsill.", "She paid for the tickets in advance.",
        "The doctor told him to rest for a week.", "There were no free seats on the bus.",
        "The river froze for the first time in years.", "I will call you as soon as I arrive.",
    ),
    "passage": (
        "Bees visit flowers to collect nectar. While they do so, pollen sticks to their bodies and is carried to the "
        "next flower. Many fruits and vegetables would not grow without this.",
        "The town opened a new library in May. It has forty thousand books, a room for children and a small cafe. On "
        "the first day more than six hundred people came.",
        "Maria missed the bus, so she walked to school. On the way she found a wallet. She gave it to her teacher, who "
        "called the owner.",
        "Glass is made from sand. The sand is heated until it melts, then it is shaped and cooled slowly. Old glass "
        "can be melted again and again.",
        "In winter many birds fly south, where it is warm and food is easy to find. In spring they return to build "
        "their nests. Some of them travel thousands of kilometers.",
        "Tom wanted to bake a cake, but there were no eggs in the kitchen. He asked his neighbor, who gave him three. "
        "In return she got the first piece.",
        "The old factory by the river was empty for twenty years. Last year artists turned it into studios. Now people "
        "from all over the city visit it on weekends.",
        "Regular sleep helps the body to recover and the brain to remember. Adults need about seven to nine hours each "
        "night. Bright screens late in the evening make it harder to fall asleep.",
        "A farmer planted trees along his fields. The trees kept the wind from carrying the soil away, and after some "
        "years his harvest was larger than before.",
        "The ship left the harbor at dawn. By noon the wind was so strong that the captain decided to turn back. "
        "Nobody was hurt, and the ship sailed again the next day.",
        "Coffee was first grown in Ethiopia. Traders brought it to Arabia, and from there it came to Europe in the "
        "sixteenth century. Today it grows in more than fifty countries.",
        "Anna plays the violin in an orchestra. Before a concert she is always nervous. As soon as the music begins, "
        "she forgets that anyone is listening.",
        "The city planted a thousand trees last spring. They give shade in summer, and the air is cleaner. Each school "
        "takes care of ten of them.",
        "Salt was once so valuable that it was used as money. It keeps meat and fish from spoiling. Whole cities "
        "became rich because salt was found nearby.",
        "Peter's watch stopped during the night. He came an hour late to work, but it was Sunday, and the office "
        "was empty. He laughed and went home for breakfast.",
        "A desert is a place with very little rain. Days can be hot and nights cold. Plants there store water, and "
        "many animals are active only at night.",
        "The first bicycles had no pedals. Riders pushed themselves along with their feet. Pedals, chains and tires "
        "filled with air came later and made riding comfortable.",
        "Two friends opened a small restaurant. At first few guests came. Then a newspaper wrote about their soup, and "
        "since then one has to reserve a table.",
        "Paper was invented in China about two thousand years ago. Before that, people wrote on bamboo, silk or clay. "
        "Paper was cheap and light, and it spread around the world.",
        "The lake was once full of rubbish. Volunteers cleaned it for three summers. Now one can swim there again, and "
        "fish have come back.",
        "Lena's grandfather collects old maps. On one of them the family found the farm where he was born. In autumn "
        "they traveled there together.",
        "Vaccines show the body a harmless part of a germ. The body learns to recognize it. When the real germ comes, "
        "the defense is already prepared.",
        "A power failure stopped the elevator between two floors. Five people waited in it for an hour. They told each "
        "other stories, and still meet once a year.",
        "Wool comes from sheep, which are shorn once a year. It is washed, combed and spun into yarn. Wool keeps warm "
        "even when it is wet.",
    ),
}  # fmt: skip

FORMS: tuple[tuple[str, str], ...] = (
    ("thing", "What is {} used for?"),
    ("thing", "Describe {} to someone who has never seen one."),
    ("thing", "Write a short advertisement for {}."),
    ("thing", "Write two lines that rhyme about {}."),
    ("thing", "List three things that one should check before buying {}."),
    ("thing", "Who would need {}, and why? Answer in one sentence."),
    ("thing", "Compare {} with its modern or older alternative."),
    ("thing", "How is {} made? Keep it short."),
    ("animal", "What does {} eat?"),
    ("animal", "Where does {} live?"),
    ("animal", "Tell me an interesting fact about {}."),
    ("animal", "Write a very short story about {} that makes a new friend."),
    ("animal", "Is {} a mammal, a bird, a fish, a reptile, an amphibian or something else?"),
    ("animal", "Invent a name for {} in a children's book and explain it."),
    ("animal", "Write a riddle whose answer is {}."),
    ("animal", "What should one do when one meets {}?"),
    ("country", "What is the capital of {}?"),
    ("country", "Name two neighbors or nearby countries of {}."),
    ("country", "Which languages are spoken in {}?"),
    ("country", "What food is {} known for?"),
    ("country", "I have one week for {}. Suggest three places to see."),
    ("country", "On which continent is {}? Answer with one word."),
    ("country", "Describe the climate of {} in one or two sentences."),
    ("country", "Write a postcard from {}."),
    ("science", "Explain {} in one sentence."),
    ("science", "Explain {} to a child of eight years."),
    ("science", "Give an example from everyday life of {}."),
    ("science", "Write a quiz question about {} and its answer."),
    ("science", "Why is {} important?"),
    ("science", "Which of these describes {} better: a thing that one can touch, or a process? Explain."),
    ("science", "List three words that have to do with {}."),
    ("activity", "Give me three tips for {}."),
    ("activity", "What do I need for {}? Answer as a list."),
    ("activity", "What is the most common mistake in {}?"),
    ("activity", "Write an invitation to a friend that suggests {} on Saturday."),
    ("activity", "Name one advantage and one disadvantage of {}."),
    ("activity", "Is {} a good hobby for older people? Answer yes or no and give a reason."),
    ("activity", "Describe {} step by step."),
    ("activity", "How long does it take to get good at {}?"),
    ("job", "What does {} do on a normal working day?"),
    ("job", "Which skills does {} need?"),
    ("job", "Write three questions for an interview with {}."),
    ("job", "Thank {} in two sentences."),
    ("job", "You are {}. Introduce yourself to a class of students."),
    ("job", "Write a job advertisement for {}."),
    ("job", "Which tools or devices does {} work with?"),
    ("word", "What is the opposite of \"{}\"?"),
    ("word", "Give two synonyms of \"{}\"."),
    ("word", "Use the word \"{}\" in a sentence."),
    ("word", "Define \"{}\" in simple words."),
    ("word", "How do you say \"{}\" in Spanish?"),
    ("word", "Is \"{}\" a positive, a negative or a neutral word? Explain briefly."),
    ("word", "Write a sentence with the opposite of \"{}\"."),
    ("sentence", "Translate into French: {}"),
    ("sentence", "Rewrite in a more formal style: {}"),
    ("sentence", "Turn this sentence into a question: {}"),
    ("sentence", "Continue the story with two more sentences. {}"),
    ("sentence", "Find the verb in this sentence: {}"),
    ("sentence", "Rewrite so that it says the opposite: {}"),
    ("sentence", "Translate into Spanish: {}"),
    ("sentence", "Rewrite in the future tense: {}"),
    ("sentence", "How many words has this sentence? {}"),
    ("passage", "Summarize in one sentence: {}"),
    ("passage", "Write a title for this text: {}"),
    ("passage", "{}\n\nAsk one question that this text answers."),
    ("passage", "{}\n\nWhat is this text about? Use at most five words."),
    ("passage", "List the most important points of the following text.\n\n{}"),
    ("passage", "What could happen next, or what follows from it?\n\n{}"),
)  # fmt: skip


def instructions(seed: int = 0) -> list[str]:
    """Return all instructions in random order."""
    found = [form.format(subject) for kind, form in FORMS for subject in SUBJECTS[kind]]
    random.Random(seed).shuffle(found)
    return found
